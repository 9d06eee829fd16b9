"""When acceptance is learned anew."""

from __future__ import annotations

from itertools import pairwise

from vllm_redrafter.budget.refits import (
    AFTER,
    FIRST_AFTER,
    NODES,
    STEPS,
    RefitsByNodes,
    RefitsBySteps,
)


def test_a_refit_waits_for_steps_and_for_nodes() -> None:
    many = RefitsByNodes()
    assert [step for step in range(1, 3 * STEPS + 1) if many.due(NODES)] == [
        STEPS,
        2 * STEPS,
        3 * STEPS,
    ]
    few = RefitsByNodes()
    assert [step for step in range(1, 2 * NODES + 1) if few.due(1)] == [NODES, 2 * NODES]


def test_a_new_drafter_is_refitted_soon_and_a_known_one_seldom() -> None:
    refits = RefitsBySteps()
    due = [step for step in range(1, 5 * AFTER) if refits.due()]
    waits = [later - sooner for sooner, later in pairwise([0, *due])]
    assert waits[0] == FIRST_AFTER
    assert all(later == min(2 * sooner, AFTER) for sooner, later in pairwise(waits))
    assert waits[-1] == AFTER
