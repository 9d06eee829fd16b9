# SPDX-License-Identifier: Apache-2.0
"""What drafts and passes of the target cost on this machine, measured when a drafter is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.budget.planner import arms_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.time_sizes import time_drafts, time_sizes
from vllm_redrafter.mlx.beam_search import Explored, beam_search
from vllm_redrafter.mlx.heads import Head
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.mlx.tree_cache import TreeInput
from vllm_redrafter.tree.policy import SearchShape

CONTEXT = 64
"""Tokens before the trees; what longer contexts cost is learned from the steps themselves."""
MOST_SECONDS = 3.0
"""Of verification, and as much of drafts."""
SOME_SECONDS = 1e-6
"""Of a draft that searches nothing: what it takes the host is not measured."""


def measure_costs(target: TreeTarget, head: Head | None, config: ReDrafterConfig) -> CostTable:
    """Time passes of 1 to K + 1 rows, and searches of the shortest and the longest length."""
    caches = target.make_cache()
    rng = np.random.default_rng(0)
    most = config.num_speculative_tokens + 1
    tokens = mx.array(rng.integers(target.vocab_size, size=CONTEXT + most))
    mx.eval(target.forward(tokens[:CONTEXT], caches))

    def verify(rows: int) -> None:
        tree = TreeInput(np.maximum(np.arange(rows) - 1, 0))
        logits, _ = target.forward(tokens[CONTEXT : CONTEXT + rows], caches, tree)
        mx.eval(logits.argmax(axis=-1))
        for cache in caches:
            cache.keep_first(0)

    passes = time_sizes(most, verify, before=lambda: None, seconds=MOST_SECONDS)
    drafts = _draft_costs(target, head, config)
    return CostTable(tuple(drafts), tuple(VerifyCost(*timed) for timed in passes))


def dummy_search(target: TreeTarget, head: Head, shape: SearchShape) -> Explored:
    """A search as steps make it, behind a hidden state of zeros; lazy."""
    hidden = mx.zeros(head.config.hidden_width, target.dtype)
    return beam_search(head, target.embed, hidden, mx.array(0), *shape)


def _draft_costs(
    target: TreeTarget, head: Head | None, config: ReDrafterConfig
) -> Iterator[DraftCost]:
    arms = arms_of(config, head is not None)
    yield from (DraftCost(1, *arm, SOME_SECONDS) for arm in arms if not arm.beam_length)
    if head is None:
        return

    def draft(shape: SearchShape, _: int) -> None:
        mx.eval(dummy_search(target, head, shape))

    searches = [arm for arm in arms if arm.beam_length]
    yield from time_drafts(searches, 1, draft, before=lambda: None, seconds=MOST_SECONDS)
