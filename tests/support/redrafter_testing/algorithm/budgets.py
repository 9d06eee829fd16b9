"""A budget at work on machines whose costs are known, with drafters whose worth is."""

from __future__ import annotations

import numpy as np

from vllm_redrafter.budget.batch_budget import CHAINS, PLAIN, TREES, BatchBudget, Plan
from vllm_redrafter.budget.choice import Flags, Floats, best_shares
from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import SearchShape, search_tiers

CONFIG = ReDrafterConfig(12, beam_width=4, beam_length=5)


def machine(row: float, level: float = 0.02, config: ReDrafterConfig = CONFIG) -> CostTable:
    """A step of one row takes 1 second, each further one `row`; a level of a draft `level`."""
    tiers = search_tiers(config, config.num_speculative_tokens)
    return CostTable(
        target="t",
        drafter="d",
        device="paper",
        draft=tuple(
            DraftCost(n, width, length, level * length * n**0.5)
            for width, length in tiers
            for n in (1, 64)
        ),
        verify=tuple(VerifyCost(rows, 1.0 + row * (rows - 1)) for rows in (1, 1000)),
    )


def survival(shape: SearchShape, requests: int, accept: float) -> Floats:
    """[R, L, W] of a drafter whose best token is right with probability `accept`."""
    by_level = accept ** np.arange(1, shape.beam_length + 1)
    by_rank = 0.4 ** np.arange(shape.beam_width)
    return np.broadcast_to(
        by_level[:, None] * by_rank, (requests, shape.beam_length, shape.beam_width)
    )


def greedy(requests: int) -> Flags:
    """None of them samples."""
    return np.zeros(requests, dtype=np.bool_)


def kind_of(plan: Plan) -> int:
    if plan.shape is None:
        return PLAIN
    return CHAINS if plan.shape.beam_width == 1 else TREES


def run(
    budget: BatchBudget,
    requests: int,
    accept: float,
    steps: int,
    slower: float = 1.0,
    pace: float = 1.0,
    samples: bool = False,
    noise: float = 0.0,
    cold: float = 1.0,
) -> list[tuple[Plan, int]]:
    """Let a drafter of known worth draft: by step, the plan and the nodes verified.

    Steps that verify take `slower` times what the table says, and all, drafts too, `pace` times;
    each step differs from that by some share of it, whose standard deviation is `noise`. The first
    draft behind a plain step, and the step that verifies it, take `cold` times as long.
    """
    decided, rng = [], np.random.default_rng(0)
    sampled = np.full(requests, samples)
    behind_plain = True
    for _ in range(steps):
        plan = budget.plan(sampled, None, CONFIG.num_speculative_tokens)
        nodes, drafts = 0, plan.shape is not None
        colder = cold if drafts and behind_plain else 1.0
        behind_plain = not drafts
        if plan.shape is not None:
            explored = survival(plan.shape, requests, accept)
            draft = budget.costs.draft_seconds(requests, *plan.shape)
            budget.drafted(plan.shape, explored, sampled, pace * colder * draft)
            ranked = np.sort(explored.reshape(requests, -1), axis=1)[:, ::-1][:, :12]
            terms = budget.terms(requests, plan)
            nodes = int(best_shares(ranked, sampled, terms)[0].sum())
        rows = requests + nodes
        seconds = float(budget.costs.verify_seconds(rows)) * (slower if nodes else 1.0) * pace
        seconds *= colder
        seconds *= max(rng.normal(1.0, noise), 0.1)
        budget.stepped(kind_of(plan) if nodes else PLAIN, requests, rows, seconds)
        decided.append((plan, nodes))
    return decided
