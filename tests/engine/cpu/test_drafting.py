"""What a step drafts, and when it is settled beforehand that it drafts nothing."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from redrafter_testing.algorithm.budgets import CONFIG, machine
from vllm_redrafter.budget.batch_budget import BatchBudget, Plan
from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.engine.cpu.drafting import AdaptiveDrafting, FixedDrafting
from vllm_redrafter.engine.cpu.proposer import Draft, TreeProposer
from vllm_redrafter.engine.stats import StepStats
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.token_tree import TokenTree

K = CONFIG.num_speculative_tokens
NOTHING, CHAIN = Plan(None, pays=False, steps=4), Plan(SearchShape(1, 2), pays=True, steps=4)


class GivenPlans(BatchBudget):
    """Plans what it is told to, and counts how often it was asked and how often not."""

    def __init__(self, *plans: Plan) -> None:
        super().__init__(CONFIG, machine(row=0.1), max_requests=8)
        self.plans = list(plans)
        self.held = 0

    def plan(self, sampled: Flags, joined: Flags | None, max_nodes: int) -> Plan:
        return self.plans.pop(0)

    def again(self) -> None:
        self.held += 1


def drafting(*plans: Plan) -> tuple[AdaptiveDrafting, GivenPlans]:
    budget = GivenPlans(*plans)
    # Nothing is drafted here.
    proposer = cast(TreeProposer, cast(Any, object()))
    return AdaptiveDrafting(proposer, budget, StepStats()), budget


def asked(drafting: AdaptiveDrafting, requests: list[str], max_nodes: int = K) -> bool:
    return drafting.pays(requests, np.zeros(len(requests), dtype=np.bool_), max_nodes)


def test_a_plan_to_draft_nothing_is_settled_for_as_many_steps_as_it_holds() -> None:
    made, budget = drafting(NOTHING, CHAIN)
    assert not made.skips_draft(["a", "b"], K)
    assert not asked(made, ["a", "b"])
    # Those of the plan after its first, whichever way they are asked for.
    assert made.skips_draft(["a", "b"], K)
    assert not asked(made, ["a", "b"])
    assert made.skips_draft(["a", "b"], K)
    assert budget.held == 3
    assert not made.skips_draft(["a", "b"], K)
    assert asked(made, ["a", "b"])


@pytest.mark.parametrize(
    ("requests", "max_nodes"),
    [(["a"], K), (["b", "a"], K), (["a", "b", "c"], K), (["a", "b"], K - 1), (["a", "b"], 0)],
)
def test_nothing_is_settled_for_another_step(requests: list[str], max_nodes: int) -> None:
    made, budget = drafting(NOTHING)
    asked(made, ["a", "b"])
    assert not made.skips_draft(requests, max_nodes)
    assert budget.held == 0


def test_nothing_is_settled_while_drafts_are_made() -> None:
    made, budget = drafting(CHAIN)
    assert asked(made, ["a"])
    assert not made.skips_draft(["a"], K)
    assert asked(made, ["a"]) and budget.held == 1
    assert not FixedDrafting(made.proposer).skips_draft(["a"], K)


def test_what_is_expected_is_counted_and_the_trees_are_the_draft_s() -> None:
    made, budget = drafting(CHAIN)
    survival = np.zeros((2, K + 1), dtype=np.float32)
    slots = torch.zeros(2, K + 1, dtype=torch.int32)
    tree = TokenTree(slots.clone(), slots.clone(), slots.clone(), torch.tensor([3, 1]).int())
    given: list[Any] = []

    class Found:
        def propose_best(self, *args: Any) -> Draft:
            given.extend(args)
            return Draft(tree, survival, survival, survival[:, None], 2.7)

    made.proposer = cast(TreeProposer, cast(Any, Found()))
    assert asked(made, ["a", "b"])
    none = torch.zeros(2)
    assert made.draft(["a", "b"], none, none, None, np.full(2, K)) is tree
    *_, shape, terms = given
    assert (shape, terms.least) == (CHAIN.shape, 0)
    assert terms.draft_seconds == budget.draft_seconds(2, shape)
    assert made.stats.expected_tokens == 2.7
