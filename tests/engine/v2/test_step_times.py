# SPDX-License-Identifier: Apache-2.0
"""What steps take, learned from their periods and from what the host waited."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from vllm_redrafter.budget.costs import MEMORY
from vllm_redrafter.budget.planner import BLOCK
from vllm_redrafter.engine.v2.step_times import Kind, StepTimes

PLAIN, VERIFY = (False, False, False), (True, True, False)
TABLE = np.array([5.0, 8.0, 20.0])


def run(times: StepTimes, kinds: list[Kind], ms: float, waited: float, table: float = 8.0) -> None:
    """Steps of four requests, in turn of these kinds, that take `ms` each."""
    now = times.began
    for step in range(2 * MEMORY):
        times.begins(now, kinds[step % len(kinds)], 4, table)
        times.waited += waited
        now += ms
        times.ended(now, True, deque())


def test_nodes_are_free_below_what_the_host_takes_and_cost_what_the_device_takes() -> None:
    times = StepTimes(lambda known: known)
    assert times.milliseconds(VERIFY, 4, TABLE) is TABLE, "nothing was run"
    run(times, [VERIFY], 13.0, waited=0.0)
    assert times.milliseconds(VERIFY, 4, TABLE).tolist() == [13.0, 13.0, 20.0]
    assert times.milliseconds(VERIFY, 64, TABLE)[0] == 13.0, "as with the nearest number"
    assert times.milliseconds(PLAIN, 4, TABLE) is TABLE
    run(times, [VERIFY], 10.0, waited=6.0)
    assert times.milliseconds(VERIFY, 4, TABLE).tolist() == [7.0, 10.0, 22.0]


def test_a_wait_for_a_step_of_another_kind_says_nothing_of_the_device() -> None:
    times = StepTimes(lambda known: known)
    run(times, [PLAIN, VERIFY], 30.0, waited=20.0)
    assert times.milliseconds(VERIFY, 4, TABLE).tolist() == [10.0, 10.0, 20.0]


def test_an_idle_engine_is_no_slow_one() -> None:
    times = StepTimes(lambda known: known)
    times.begins(0.0, PLAIN, 1, 5.0)
    times.ended(1e6, False, deque())
    run(times, [PLAIN], 6.0, waited=0.0)
    assert times.milliseconds(PLAIN, 1, TABLE)[0] == 6.0


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_know_what_the_first_one_measured(rank: int) -> None:
    shared: list[Any] = []
    ranks = [StepTimes(lambda known: known), StepTimes(lambda _: shared[-1])]
    ranks[0]._agree = lambda known: shared.append(known) or known  # type: ignore[func-returns-value]
    taken = []
    for step in range(BLOCK):
        for times, ms in zip(ranks, (7.0, 9.0), strict=True):
            times.begins(step * ms, PLAIN, 1, 5.0)
            judged = deque([(2.0, 1)]) if times is ranks[0] and step == BLOCK - 1 else deque()
            taken.append(times.ended((step + 1) * ms, True, judged))
    assert ranks[rank].milliseconds(PLAIN, 1, TABLE)[0] == 7.0
    assert taken[-2:] == [[(2.0, 1)]] * 2
