# SPDX-License-Identifier: Apache-2.0
"""A planner at work on machines whose costs are known, with drafters whose worth is."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.choice import Choice, Flags, Floats, VerifyCosts, best_budget
from vllm_redrafter.budget.costs import CHAINS, PLAIN, TREES, CostTable, DraftCost
from vllm_redrafter.budget.planner import BatchPlanner, arms_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import SearchShape

CONFIG = ReDrafterConfig(12, beam_width=4, beam_length=5, context_matches=0)


def machine(row: float, level: float = 0.02, config: ReDrafterConfig = CONFIG) -> CostTable:
    """A step of one row takes 1 second, each further one `row`; a level of a draft `level`."""
    tiers = arms_of(config, has_drafter=True)
    return CostTable(
        draft=tuple(
            DraftCost(n, width, length, level * max(length, 0.01) * n**0.5)
            for width, length in tiers
            for n in (1, 64)
        ),
        verify=tuple((rows, 1.0 + row * (rows - 1)) for rows in (1, 1000)),
    )


def survival(shape: SearchShape, requests: int, accept: float) -> Floats:
    """[R, L, W] of a drafter whose best token is right with probability `accept`."""
    by_level = accept ** np.arange(1, shape.beam_length + 1)
    by_rank = 0.4 ** np.arange(shape.beam_width)
    sizes = requests, shape.beam_length, shape.beam_width
    return np.broadcast_to(by_level[:, None] * by_rank, sizes)


def best_trim(
    survival: Floats, sampled: Flags, verify_costs: VerifyCosts
) -> tuple[npt.NDArray[np.int64], Choice]:
    """How many of its first nodes each request verifies; survival [R, K] descends, 0 for none."""
    requests = survival.shape[0]
    ratios = verify_costs.ratios[sampled.astype(np.int64)]
    probable = survival.astype(np.float64) * ratios[:, None]
    verify = verify_costs.tree_seconds[: requests + survival.size + 1].copy()
    verify[requests] = verify_costs.chain_seconds[requests]
    choice = best_budget(probable, requests, verify_costs.draft_seconds, verify)
    least = min(verify_costs.least, int(np.count_nonzero(probable > 0)))
    if choice.budget < least:
        tokens = requests + float(np.sort(probable, axis=None)[-least:].sum())
        seconds = verify_costs.draft_seconds + float(verify[requests + least])
        choice = Choice(least, tokens, tokens / seconds)
    # Stable: of equal nodes of one request, the first comes first.
    best = np.argsort(-probable, axis=None, kind="stable")[: choice.budget]
    return np.bincount(best // survival.shape[1], minlength=requests), choice


@dataclass
class Machine:
    """Steps and drafts whose seconds are known; `overhead` and `trees` are not in its table.

    `noise` is a step's standard deviation over its mean, `cold` a factor after plain steps.
    """

    table: CostTable
    overhead: float = 0.0
    trees: float = 1.0
    noise: float = 0.0
    cold: float = 1.0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def step(self, kind: int, rows: int) -> float:
        seconds = float(self.table.verify_seconds(rows)) + self.overhead
        return seconds * (self.trees if kind == TREES else 1.0) * self._noise()

    def draft(self, shape: SearchShape, requests: int) -> float:
        return self.table.draft_seconds(requests, *shape) * self._noise()

    def _noise(self) -> float:
        return max(self._rng.normal(1.0, self.noise), 0.1)


def run(
    planner: BatchPlanner,
    machine: Machine,
    requests: int,
    accept: float,
    steps: int,
    samples: bool = False,
) -> list[tuple[SearchShape | None, int, float, float]]:
    """By step: the search, the nodes verified, the seconds, and the tokens expected of it.

    The drafter's best token is right with probability `accept`.
    """
    done, sampled = [], np.full(requests, samples)
    was_plain = True
    for _ in range(steps):
        shape = planner.plan(sampled, planner.config.num_speculative_tokens)
        nodes, draft, tokens = 0, 0.0, float(requests)
        colder = machine.cold if shape is not None and was_plain else 1.0
        was_plain = shape is None
        if shape is not None:
            explored = survival(shape, requests, accept)
            draft = machine.draft(shape, requests) * colder
            planner.drafted(explored, sampled, draft)
            most = planner.config.num_speculative_tokens
            ranked = np.sort(explored.reshape(requests, -1), axis=1)[:, ::-1][:, :most]
            costs = planner.verify_costs(requests)
            if shape.beam_width == 1:
                costs = costs._replace(tree_seconds=costs.chain_seconds)
            kept, choice = best_trim(ranked, sampled, costs)
            nodes, tokens = int(kept.sum()), choice.tokens
        kind = PLAIN if not nodes else CHAINS if shape.beam_width == 1 else TREES
        seconds = machine.step(kind, requests + nodes) * colder
        planner.stepped(kind, requests, requests + nodes, seconds)
        done.append((shape, nodes, seconds + draft, tokens))
    return done
