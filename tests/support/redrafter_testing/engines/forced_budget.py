"""What tests ask of a CPU worker's budget, from inside its process, by `Engine.rpc`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from vllm_redrafter.budget.batch_budget import BatchBudget, Plan
from vllm_redrafter.budget.choice import Choice, Flags
from vllm_redrafter.tree.policy import search_tiers


class RandomBudget(BatchBudget):
    """Another search, or none, every few steps, and of its nodes any number for each request."""

    random = random.Random(0)

    def plan(self, sampled: Flags, joined: Flags | None, max_nodes: int) -> Plan:
        shapes = (None, *search_tiers(self.config, max_nodes))
        return Plan(self.random.choice(shapes), pays=True, steps=self.random.randint(1, 3))

    def share(self, survival: Any, sampled: Flags, plan: Plan) -> tuple[Any, Choice]:
        found = (survival > 0).sum(axis=1)
        nodes = np.array([self.random.randint(0, most) for most in found], dtype=np.int64)
        return nodes, Choice(int(nodes.sum()), float(len(sampled)), 1.0)


class OpenGate(BatchBudget):
    """Drafts at every step, and verifies all of it."""

    def plan(self, sampled: Flags, joined: Flags | None, max_nodes: int) -> Plan:
        return Plan(search_tiers(self.config, max_nodes)[-1], pays=True)

    def share(self, survival: Any, sampled: Flags, plan: Plan) -> tuple[Any, Choice]:
        nodes = (survival > 0).sum(axis=1)
        return nodes, Choice(int(nodes.sum()), float(len(sampled)), 1.0)


class ShutGate(BatchBudget):
    """Never drafts; mostly without being asked."""

    def plan(self, sampled: Flags, joined: Flags | None, max_nodes: int) -> Plan:
        return Plan(None, pays=False, steps=8)


def force(worker: Any, budget: type[BatchBudget] | None) -> None:
    """Let a budget of this kind decide; None for the engine's own again."""
    drafting = worker.model_runner.drafting
    own = vars(worker).setdefault("own_budget", drafting.budget)
    drafting.budget = own
    if budget is not None:
        drafting.budget = budget(own.config, own.costs, worker.model_runner.max_num_reqs)
