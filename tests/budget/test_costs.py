# SPDX-License-Identifier: Apache-2.0
"""Tables of costs, and what corrects them."""

from typing import Any

import pytest

from vllm_redrafter.budget.costs import (
    CHAINS,
    MEMORY,
    OUTDATED,
    PLAIN,
    TREES,
    CostTable,
    DraftCost,
    StepTimes,
)
from vllm_redrafter.tree.policy import SearchShape


def table(**changes: object) -> CostTable:
    draft = ((1, 4, 1, 1.0), (1, 4, 5, 3.0), (3, 4, 1, 2.0), (3, 4, 5, 8.0))
    values = {
        "draft": tuple(DraftCost(*entry) for entry in draft),
        "verify": ((1, 10.0), (5, 12.0), (9, 20.0)),
    } | changes
    return CostTable(**values)  # type: ignore[arg-type]


def test_costs_lie_on_the_lines_between_measurements_and_beyond_the_last_one() -> None:
    assert table().verify_seconds([1, 3, 7]).tolist() == [10.0, 11.0, 16.0]
    assert table().draft_seconds(1, 4, 3) == pytest.approx(2.0)
    assert table().draft_seconds(2, 4, 5) == pytest.approx(5.5)
    assert table().verify_seconds(11) == pytest.approx(24.0)
    assert table().draft_seconds(4, 4, 1) == pytest.approx(2.5)
    # More work never takes less time.
    noisy = table(verify=((1, 10.0), (2, 9.0), (3, 11.0)))
    assert noisy.verify_seconds([1, 2, 3]).tolist() == [9.0, 9.0, 11.0]


def test_less_of_a_search_is_never_dearer_than_more_of_it() -> None:
    """What was added to the chain, to one level, or to one request is a disturbance."""
    noisy = table(
        draft=(
            *(DraftCost(1, 1, 1, 2.5), DraftCost(1, 1, 5, 9.0), DraftCost(2, 1, 5, 7.0)),
            *(DraftCost(1, 4, 1, 2.0), DraftCost(1, 4, 5, 6.0), DraftCost(2, 4, 5, 8.0)),
        )
    )
    assert [noisy.draft_seconds(1, 1, length) for length in (1, 5)] == [2.0, 6.0]
    assert noisy.draft_seconds(2, 1, 5) == 7.0
    assert [noisy.draft_seconds(n, 4, 5) for n in (1, 2)] == [6.0, 8.0]


def ran(times: StepTimes, kind: int, requests: int, seconds: float, count: int = MEMORY) -> None:
    for _ in range(count):
        times.stepped(kind, requests, requests, seconds, explores=False)


def test_steps_of_each_kind_are_corrected_by_what_they_took() -> None:
    times = StepTimes(table(), 9)
    ran(times, PLAIN, 1, 13.0)
    ran(times, TREES, 1, 16.0)
    plain, trees = (times.step_seconds(kind, 1)[1] for kind in (PLAIN, TREES))
    assert 12.0 < plain < 13.1 and 15.0 < trees < 16.1
    # What was never seen takes the least that vLLM adds to the others.
    assert times.step_seconds(CHAINS, 1)[1] == plain


def test_what_trees_took_is_forgotten_where_chains_alone_were_run_for_long() -> None:
    """Of long contexts, say: nobody would run trees again."""
    times = StepTimes(table(), 9)
    ran(times, TREES, 1, 40.0)
    ran(times, CHAINS, 1, 10.0, count=OUTDATED - 1)
    dear, chains = (times.step_seconds(kind, 1)[1] for kind in (TREES, CHAINS))
    assert dear > 2 * chains
    ran(times, CHAINS, 1, 10.0, count=1)
    assert times.step_seconds(TREES, 1)[1] == pytest.approx(chains, rel=0.01)


def test_a_slow_phase_of_the_machine_is_none_of_the_arm_that_is_run() -> None:
    times = StepTimes(table(), 9)
    ran(times, PLAIN, 1, 10.0)
    ran(times, CHAINS, 1, 10.0)
    before = times.step_seconds(CHAINS, 1)[1] / times.step_seconds(PLAIN, 1)[1]
    ran(times, PLAIN, 1, 20.0, count=2 * MEMORY)
    assert times.pace == pytest.approx(2.0, rel=0.05)
    for _ in range(MEMORY):
        times.stepped(CHAINS, 1, 1, 20.0, explores=True)
    after = times.step_seconds(CHAINS, 1)[1] / times.step_seconds(PLAIN, 1)[1]
    assert after == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("busy", [1.0, 1.5, 3.0])
def test_a_table_that_was_measured_in_a_busy_moment_is_mended(busy: float) -> None:
    """Steps of fewer rows than those that were learned from, too, and what follows from them."""
    quiet, trees = table(), SearchShape(4, 5)

    def measured(entries: Any) -> Any:
        return tuple((*size, busy * seconds) for *size, seconds in entries)

    draft = tuple(DraftCost(*entry) for entry in measured(quiet.draft))
    dear = table(draft=draft, verify=measured(quiet.verify))
    times = StepTimes(dear, 9)
    for kind, rows, explores in [(PLAIN, 1, False), (TREES, 9, True), (TREES, 3, False)]:
        seconds = float(quiet.verify_seconds(rows))
        for _ in range(3 * MEMORY):
            times.stepped(kind, 1, rows, seconds, explores)
    for _ in range(MEMORY):
        times.stepped(CHAINS, 1, 3, float(quiet.verify_seconds(3)), explores=True)
        times.drafted(trees, 1, quiet.draft_seconds(1, *trees))
    assert times.pace == pytest.approx(1.0, rel=1e-3)
    for kind in (PLAIN, CHAINS, TREES):
        expected = quiet.verify_seconds([1, 3, 9])
        assert times.step_seconds(kind, 1)[[1, 3, 9]] == pytest.approx(expected, rel=1e-3)
    assert times.draft_seconds(trees, 1) == pytest.approx(quiet.draft_seconds(1, *trees), rel=1e-3)
