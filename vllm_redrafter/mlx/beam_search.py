# SPDX-License-Identifier: Apache-2.0
"""Beam search in MLX, for one request; `tree/beam_search.py` is the torch form, for a batch."""

import math
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.mlx.heads import Head


class Explored(NamedTuple):
    """`tree.beam_search.ExploredNodes` of one request, in MLX: each [L, W], int32 or float32."""

    tokens: mx.array
    back_pointers: mx.array
    log_probs: mx.array


def beam_search(
    head: Head,
    embed: Callable[[mx.array], mx.array],
    hidden: mx.array,
    root: mx.array,
    beam_width: int,
    beam_length: int,
) -> Explored:
    """Search the L tokens that follow the root; nothing is evaluated here.

    Equally probable nodes of a level are ordered by their beam, then by draft token.

    Args:
        head: the draft head.
        embed: the target's input embedding, tokens [...] -> [..., H].
        hidden: [(1 + n) H], the target's, which predicted the root: the last, then n layers'.
        root: [] integer, the last sampled token.
        beam_width, beam_length: W and L.
    """
    condition = head.condition(hidden[None])
    # The first level has one beam, the root itself.
    state = head.start(condition, embed(root[None]))
    scores, candidates = log_softmax_of_top(head.logits(condition, state), beam_width)
    log_probs, tokens = scores[0], head.target_tokens(candidates[0])
    back_pointers = mx.zeros_like(tokens)
    levels = [Explored(tokens, back_pointers, log_probs)]

    for _ in range(1, beam_length):
        state = head.advance(state[back_pointers], embed(tokens))
        scores, candidates = log_softmax_of_top(head.logits(condition, state), beam_width)
        # A beam of the next level is among its parent's W best, so W x W candidates suffice.
        scores = (scores + log_probs[:, None]).flatten()
        best = _descending(scores)[:beam_width]
        log_probs, back_pointers = scores[best], best // beam_width
        tokens = head.target_tokens(candidates.flatten()[best])
        levels.append(Explored(tokens, back_pointers, log_probs))
    tokens, back_pointers, log_probs = (mx.stack(list(part)) for part in zip(*levels, strict=True))
    return Explored(tokens.astype(mx.int32), back_pointers.astype(mx.int32), log_probs)


def log_softmax_of_top(logits: mx.array, num: int) -> tuple[mx.array, mx.array]:
    """The `num` <= 50 best tokens of logits [N, V], normalised over the top 50 alone.

    Returns:
        (log-probabilities [N, num] float32 in descending order, tokens [N, num] uint32, the smaller
        first where they are equal); where V < num, the missing entries are -inf and token 0.
    """
    values, tokens = _top(logits, min(TOP_TOKENS, logits.shape[-1]))
    values = values.astype(mx.float32)
    log_probs = values[:, :num] - mx.logsumexp(values, axis=-1, keepdims=True)
    tokens = tokens[:, :num]
    if missing := num - tokens.shape[-1]:
        log_probs = mx.pad(log_probs, [(0, 0), (0, missing)], constant_values=-math.inf)
        tokens = mx.pad(tokens, [(0, 0), (0, missing)])
    return log_probs, tokens


def _top(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest logits of each row in descending order, and their tokens.

    They are in the `count` groups of tokens that have the largest maxima. So what is sorted are
    the maxima and those groups, a few thousand numbers. MLX's own `argpartition` promises no order
    of equal ones, and sorts the whole vocabulary on Metal.
    """
    rows, vocab = logits.shape
    # A power of two near sqrt(vocab / count): as many maxima as tokens in the best groups.
    size = 1 << round(math.log2(vocab / count) / 2)
    if unused := -vocab % size:
        logits = mx.pad(logits, [(0, 0), (0, unused)], constant_values=-math.inf)
    groups = logits.reshape(rows, -1, size)
    # In the order of their tokens, which stable sorting then leaves as it is among equal logits.
    best = mx.sort(_descending(groups.max(axis=-1))[:, :count], axis=-1)
    candidates = mx.take_along_axis(groups, best[..., None], axis=1).flatten(1)
    tokens = (best[..., None] * size + mx.arange(size, dtype=mx.uint32)).flatten(1)
    if unused:
        # NaN, of a target whose numbers overflow, is sorted behind the padding.
        tokens = mx.minimum(tokens, vocab - 1)
    order = _descending(candidates)[:, :count]
    values = mx.take_along_axis(candidates, order, axis=1)
    return values, mx.take_along_axis(tokens, order, axis=1)


def _descending(values: mx.array) -> mx.array:
    """The order [..., N] uint32 that sorts the last axis; MLX's sort is stable."""
    return mx.argsort(-values, axis=-1)
