# SPDX-License-Identifier: Apache-2.0
"""Of which lengths drafts have graphs, by who says how many nodes are verified."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from vllm_redrafter.engine.cuda.schedule import default_schedule
from vllm_redrafter.engine.cuda.speculator import lengths_of_drafts
from vllm_redrafter.tree.policy import SearchShape

K, REQUESTS, SHAPE = 12, 256, SearchShape(4, 5)
Schedule = list[tuple[int, int, int]] | None


def config(schedule: Schedule, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> Any:
    return SimpleNamespace(
        num_speculative_tokens=K,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=schedule),
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
    )


@pytest.mark.parametrize(
    ("schedule", "lengths"),
    [
        (None, (5,)),
        ([(1, 8, 12), (9, REQUESTS, 4)], (5,)),
        ([(1, 8, 12), (9, REQUESTS, 2)], (3, 5)),
        ([(1, 8, 3), (9, 64, 1), (65, REQUESTS, 0)], (1, 3, 5)),
        (default_schedule(K, REQUESTS, ridge=206), (1, 3, 5)),
    ],
    ids=["one K", "more nodes than half", "few nodes", "none", "the default"],
)
def test_a_schedule_s_trees_have_the_levels_that_they_need(
    schedule: Schedule, lengths: tuple[int, ...]
) -> None:
    assert lengths_of_drafts(config(schedule), SHAPE, fixed=True) == lengths


def test_a_budget_chooses_among_all() -> None:
    assert lengths_of_drafts(config(None), SHAPE, fixed=False) == (1, 3, 5)


def test_a_budget_may_choose_matches_alone_and_a_schedule_does_not() -> None:
    assert lengths_of_drafts(config(None), SHAPE, fixed=False, matches=True) == (0, 1, 3, 5)
    without = config(None, CUDAGraphMode.NONE)
    assert lengths_of_drafts(without, SHAPE, fixed=False, matches=True) == (5,)


def test_without_full_graphs_there_is_one_length() -> None:
    """Another would be compiled when it is first drafted, which requests would wait for."""
    without = config(default_schedule(K, REQUESTS, 206), CUDAGraphMode.NONE)
    assert lengths_of_drafts(without, SHAPE, fixed=True) == (5,)
