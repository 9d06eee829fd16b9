# SPDX-License-Identifier: Apache-2.0
"""What a step drafts, and when it is settled beforehand that it drafts nothing."""

from typing import Any, cast

import numpy as np
import pytest

from redrafter_testing.algorithm.budgets import CONFIG, machine
from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.costs import MEMORY, PLAIN, TREES
from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.drafting.drafting import Drafting
from vllm_redrafter.drafting.proposer import Proposer
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.tree.policy import SearchShape

K = CONFIG.num_speculative_tokens
CHAIN = SearchShape(1, 2)


class GivenPlans(BatchPlanner):
    """Plans what it is told to, and lets so many plain steps pass after each."""

    def __init__(self, *plans: SearchShape | None, passing: int = 0) -> None:
        super().__init__(CONFIG, machine(row=0.1), max_requests=8)
        self.plans, self.passing = list(plans), passing
        self.passed = 0

    def plan(self, sampled: Flags, max_nodes: int) -> SearchShape | None:
        self.shape = self.plans.pop(0)
        return self.shape

    def pass_plain_step(self) -> bool:
        self.passed += 1
        return self.shape is None and self.passed <= self.passing


def drafting(*plans: SearchShape | None, passing: int = 0) -> tuple[Drafting, GivenPlans]:
    planner = GivenPlans(*plans, passing=passing)
    # Nothing is drafted here.
    proposer = cast(Proposer[Any], cast(Any, object()))
    made = Drafting(proposer, StepStats())
    made.planner = planner
    return made, planner


def asked(drafting: Drafting, requests: list[str], max_nodes: int = K) -> bool:
    greedy = np.zeros(len(requests), dtype=np.bool_)
    return drafting.plan(requests, greedy, max_nodes, max_nodes) is not None


def test_a_plan_to_draft_nothing_is_settled_for_as_many_steps_as_the_planner_says() -> None:
    made, _ = drafting(None, CHAIN, passing=2)
    assert not made.skips_draft(["a", "b"], K)
    assert not asked(made, ["a", "b"])
    assert made.skips_draft(["a", "b"], K)
    assert made.skips_draft(["a", "b"], K)
    assert not made.skips_draft(["a", "b"], K)
    assert asked(made, ["a", "b"])


@pytest.mark.parametrize(
    ("requests", "max_nodes"),
    [(["a"], K), (["b", "a"], K), (["a", "b", "c"], K), (["a", "b"], K - 1), (["a", "b"], 0)],
)
def test_nothing_is_settled_for_another_step(requests: list[str], max_nodes: int) -> None:
    made, planner = drafting(None, passing=2)
    asked(made, ["a", "b"])
    assert not made.skips_draft(requests, max_nodes)
    assert planner.passed == 0


def test_steps_are_counted_beside_plain_ones_where_these_were_timed_of_as_many_requests() -> None:
    made, planner = drafting()
    for _ in range(MEMORY):
        planner.times.stepped(PLAIN, 2, 2, 0.2, explores=True)
    made.record_step_time((TREES, 8, 24), 20, 0.7, 0.1)
    assert made.stats == StepStats()
    made.record_step_time((TREES, 2, 6), 5, 0.4, 0.1)
    assert made.stats == StepStats(decoding_seconds=0.4, plain_seconds=pytest.approx(0.2 * 5 / 2))
