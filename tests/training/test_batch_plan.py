# SPDX-License-Identifier: Apache-2.0
"""Packing, and the plan of the steps."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_redrafter.training.batch_plan import BatchPlan, pack
from vllm_redrafter.utils.errors import ConfigError


@given(st.lists(st.integers(1, 20), max_size=60), st.randoms())
def test_packing_keeps_every_row_within_capacity(lengths: list[int], random: object) -> None:
    order = list(range(len(lengths)))
    blocks = pack(lengths, order, capacity=20)
    assert sorted(row for block in blocks for row in block) == order
    totals = [sum(lengths[row] for row in block) for block in blocks]
    assert all(total <= 20 for total in totals)
    # Of two blocks that are at most half full one would have taken the other's rows.
    assert sum(total <= 10 for total in totals) <= 1


def plan(num: int = 50, batch_size: int = 4, seed: int = 0) -> BatchPlan:
    lengths = torch.randint(1, 9, (num,), generator=torch.Generator().manual_seed(3)).numpy()
    return BatchPlan(lengths, block_length=16, batch_size=batch_size, seed=seed)


def test_an_epoch_reads_each_row_at_most_once_in_whole_steps() -> None:
    steps = plan().epoch(0)
    read = [row for step in steps for block in step for row in block]
    assert len(read) == len(set(read)) > 30
    assert all(len(step) == 4 for step in steps)
    assert steps != plan().epoch(1) != plan(seed=1).epoch(1)


def test_steps_can_start_anywhere() -> None:
    everything = list(islice(plan().steps(), 25))
    for first in (0, 1, 6, 7, 20):
        assert list(islice(plan().steps(first), 25 - first)) == everything[first:]
    assert plan().num_steps(2) == len(plan().epoch(0)) + len(plan().epoch(1))


def test_fewer_blocks_than_a_batch_are_one_step_and_none_are_refused() -> None:
    assert [len(step) for step in plan(num=3, batch_size=50).epoch(0)] == [1]
    with pytest.raises(ConfigError, match="there is no text"):
        plan(num=0)
