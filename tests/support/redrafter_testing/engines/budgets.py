"""An engine whose batches share a budget; its decisions as a test wants them, by `Engine.rpc`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm_redrafter.budget import refits
from vllm_redrafter.budget.draft_lengths import LengthChoice
from vllm_redrafter.budget.gate import Gate

GRAPHS = (2, 8, 32, 96)
"""Rows of each. There is one for steps of any lengths. The largest batch has 104: its full graph is
beyond vLLM's own sizes, and its output larger than that of any piecewise one."""


def use() -> None:
    """Engines started in this process draft with the oracle and replay graphs, as on a GPU."""
    from redrafter_testing.gpu import recorded_graphs
    from redrafter_testing.oracles import oracle_v2

    recorded_graphs.use(GRAPHS)
    oracle_v2.use()
    refits.AFTER = 10


class RandomGate:
    """Open with a given probability, whatever drafting pays."""

    def __init__(self, probability: float) -> None:
        self._probability, self._random = probability, random.Random(0)

    def opens(self, pays: bool, gain: float) -> bool:
        return self._random.random() < self._probability


class RandomLengths(LengthChoice):
    """Any length, whatever it pays.

    Attributes:
        chosen: how often each was.
    """

    def __init__(self, lengths: Sequence[int], max_nodes: int) -> None:
        super().__init__(lengths, max_nodes)
        self.chosen: Counter[int] = Counter()
        self._random = random.Random(2)

    def next(self) -> int:
        length = self._random.choice(self.lengths)
        self.chosen[length] += 1
        return length


def force(worker: Any, gate: float, budgets: bool = True) -> None:
    """Decide at random from here on, and remember what was decided.

    Args:
        worker: a V2 worker whose engine is adaptive.
        gate: the share of steps that draft.
        budgets: every step's budget is any number up to the nodes at hand; False leaves vLLM's.
    """
    leave_alone(worker)
    manager = worker.model_runner.adaptive_verification
    kind, choices = type(manager), random.Random(1)
    manager.gate = RandomGate(gate)
    manager.lengths = RandomLengths(manager.lengths.lengths, manager.num_speculative_steps)
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
        worker.admitted.append(manager._batch_draft_capacity[: len(req_ids)].tolist())
        return result

    manager.get_num_tokens, manager.reallocate_drafts = get_num_tokens, reallocate_drafts


def leave_alone(worker: Any) -> None:
    """Undo `force` and `make_verification_free`."""
    manager = worker.model_runner.adaptive_verification
    if hasattr(worker, "costs"):
        manager.cost_tables, manager._max_total_logits = worker.costs
        del worker.costs
    for name in ("get_num_tokens", "reallocate_drafts"):
        vars(manager).pop(name, None)
    manager.gate = Gate()
    manager.lengths = LengthChoice(manager.lengths.lengths, manager.num_speculative_steps)
    worker.admitted = []


def make_verification_free(worker: Any, rows: int) -> None:
    """Steps cost the same whatever they verify; `rows` of logits are what the sampler takes."""
    manager = worker.model_runner.adaptive_verification
    draft, verify = manager.cost_tables
    worker.costs = manager.cost_tables, manager._max_total_logits
    manager.cost_tables = 0 * draft, 0 * verify + 1
    manager._max_total_logits = rows


def admitted(worker: Any) -> list[list[int]]:
    """How many nodes each request of each step verified, since `force`."""
    return list(worker.admitted)


def lengths(worker: Any) -> dict[int, int]:
    """How many drafts had so many levels, since `force`."""
    return dict(worker.model_runner.adaptive_verification.lengths.chosen)


def estimator(worker: Any) -> tuple[list[float], int]:
    """The acceptance estimator's slope and biases, and how many nodes it has seen judged."""
    estimator = worker.model_runner.speculator.confidence.estimator
    learned = [*estimator.slope.tolist(), *estimator.biases.tolist()]
    return learned, estimator.calibration().judged
