"""What drafts and passes of the target cost on this machine, measured when a drafter is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.budget.planner import arms_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.time_sizes import time_sizes
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
    return CostTable(
        draft=tuple(_draft_costs(target, head, config)),
        verify=tuple(VerifyCost(*timed) for timed in passes),
    )


def search_for_nobody(target: TreeTarget, head: Head, shape: SearchShape) -> Explored:
    """A search as steps make it, behind a hidden state of zeros; lazy."""
    hidden = mx.zeros(head.config.hidden_width, target.dtype)
    return beam_search(head, target.embed, hidden, mx.array(0), *shape)


def _draft_costs(
    target: TreeTarget, head: Head | None, config: ReDrafterConfig
) -> Iterator[DraftCost]:
    arms = arms_of(config, head is not None)
    lengths = {arm.beam_length for arm in arms} - {0}
    # A level costs as much as another: the shortest and the longest search say it all.
    said = {min(lengths, default=0), max(lengths, default=0)}
    shapes = [arm for arm in arms if arm.beam_length in said and arm.beam_length]
    yield from (DraftCost(1, *arm, SOME_SECONDS) for arm in arms if not arm.beam_length)
    if head is None:
        return

    def draft(shape: SearchShape, _: int) -> None:
        mx.eval(search_for_nobody(target, head, shape))

    for shape in shapes:
        seconds = MOST_SECONDS / len(shapes)
        timed = time_sizes(1, partial(draft, shape), before=lambda: None, seconds=seconds)
        yield DraftCost(1, *shape, timed[0][1])
