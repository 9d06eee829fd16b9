# SPDX-License-Identifier: Apache-2.0
"""An engine whose batches share a budget; its decisions as a test wants them, by `Engine.rpc`."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_redrafter.budget.choice import Flags, Floats
from vllm_redrafter.budget.planner import Step
from vllm_redrafter.engine.v2 import node_confidence

GRAPHS = (2, 8, 32, 96)
"""Rows of each, for decoding steps alone. The largest batch has 104, beyond vLLM's own sizes."""


def use() -> None:
    """Engines started in this process draft with the oracle and replay graphs, as on a GPU."""
    from redrafter_testing.gpu import recorded_graphs
    from redrafter_testing.oracles import oracle_v2

    recorded_graphs.use(GRAPHS, flash_attention=True)
    oracle_v2.use()
    node_confidence.LONGEST_REFIT = 10


class RandomArms:
    """Any arm, or the one of drafts of a length; `chosen` counts them by length."""

    def __init__(self, lengths: tuple[int, ...], drafting: float, only: int | None = None) -> None:
        self.chosen: Counter[int] = Counter()
        self._lengths, self._drafting = lengths, drafting
        self._arms = [arm for arm, n in enumerate(lengths, start=1) if only in (None, n)]
        self._random = random.Random(0)

    def next(self, sampled: Flags, room: int, rates: Callable[[], Floats]) -> Step:
        if self._random.random() >= self._drafting:
            return Step(0, False)
        arm = self._random.choice(self._arms)
        self.chosen[self._lengths[arm - 1]] += 1
        return Step(arm, False)


def force(worker: Any, drafting: float, budgets: bool = True, length: int | None = None) -> None:
    """Decide at random from here on: a share of steps drafts, their budgets are any numbers."""
    leave_alone(worker)
    manager = worker.model_runner.adaptive_verification
    kind, choices = type(manager), random.Random(1)
    worker.arms, manager.arms = manager.arms, RandomArms(manager.lengths, drafting, length)
    manager._arm = 0  # Of steps without draft tokens, which are not planned.
    worker.admitted = []

    def get_num_tokens(*args: Any) -> int:
        kind.get_num_tokens(manager, *args)
        drafts, others, budget = manager._batch_budget
        if budgets and manager._drafted:
            budget = choices.randint(0, sum(drafts.values()))
        manager._batch_budget = drafts, others, budget
        return int(sum(others.values()) + budget)

    def reallocate_drafts(req_ids: list[str], idx_mapping: Any) -> Any:
        result = kind.reallocate_drafts(manager, req_ids, idx_mapping)
        worker.admitted.append((result[0].diff() - 1).tolist())
        return result

    manager.get_num_tokens, manager.reallocate_drafts = get_num_tokens, reallocate_drafts


def leave_alone(worker: Any) -> None:
    """Undo `force` and `make_verification_free`."""
    manager = worker.model_runner.adaptive_verification
    if hasattr(worker, "costs"):
        model = manager.model
        model.draft_costs, model.verify_costs, manager._max_total_logits = worker.costs
        del worker.costs, manager.times.milliseconds
    for name in ("get_num_tokens", "reallocate_drafts"):
        vars(manager).pop(name, None)
    if hasattr(worker, "arms"):
        manager.arms = worker.arms
    worker.admitted = []


def make_verification_free(worker: Any, rows: int) -> None:
    """Steps cost the same whatever they verify; `rows` of logits are what the sampler takes."""
    manager = worker.model_runner.adaptive_verification
    model = manager.model
    worker.costs = model.draft_costs, model.verify_costs, manager._max_total_logits
    model.draft_costs = [0 * costs for costs in model.draft_costs]
    model.verify_costs = 0 * model.verify_costs + 1
    manager.times.milliseconds = lambda kind, requests, table: table  # not what steps took here
    manager._max_total_logits = rows


def admitted(worker: Any) -> list[list[int]]:
    """How many nodes each request of each step verified, since `force`."""
    return list(worker.admitted)


def lengths(worker: Any) -> dict[int, int]:
    """How many drafts had so many levels, since `force`."""
    return dict(worker.model_runner.adaptive_verification.arms.chosen)


def estimator(worker: Any) -> list[float]:
    """The acceptance estimator's slope and biases."""
    estimator = worker.model_runner.speculator.confidence.estimator
    return [*estimator.slope.tolist(), *estimator.biases.tolist()]
