# SPDX-License-Identifier: Apache-2.0
"""Beam search on the host: `tree/beam_search.py` with one numba loop per level."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.heads.head import SearchHead
from vllm_redrafter.heads.shortlist import Shortlist
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.compiled import Array, compiled
from vllm_redrafter.utils.top_of_many import top, top_of_many


@torch.inference_mode()
def search(
    drafter: SearchHead,
    embed: Callable[[Tensor], Tensor],
    hidden: Tensor,
    root_tokens: Tensor,
    shape: SearchShape,
    candidates: int = 0,
) -> ExploredNodes:
    """As `beam_search.beam_search`."""
    requests, (width, length) = len(root_tokens), shape
    tokens = np.zeros((length, requests, width), dtype=np.int64)
    back_pointers = np.zeros((length, requests, width), dtype=np.int64)
    log_probs = np.zeros((length, requests, width), dtype=np.float32)
    # Of each beam, the row of its parent among all beams of the level above.
    parents = np.zeros(requests * width, dtype=np.int64)
    condition = drafter.condition(hidden).unsqueeze(1)
    # The first level has one beam, the root itself; only from the second on are there W.
    state = drafter.start(condition, drafter.embedding_of(embed, 0)(root_tokens.unsqueeze(1)))
    above = np.zeros((requests, 1), dtype=np.float32)
    shortlist = None
    if candidates:
        shortlist = drafter.shortlist(condition, state, length, candidates)
    for level in range(length):
        if level:
            if width > 1:
                of_beams = state.flatten(0, 1).index_select(0, torch.from_numpy(parents))
                state = of_beams.view(requests, width, -1)
            embedded = drafter.embedding_of(embed, level)(torch.from_numpy(tokens[level - 1]))
            state = drafter.advance(state, embedded, level)
        logits, ranked_tokens = _ranked(drafter, condition, state, level, shortlist)
        grown = tokens[level], back_pointers[level], log_probs[level], parents
        _extend(logits, ranked_tokens, above, *grown)
        found = torch.from_numpy(tokens[level])
        if (of_target := drafter.target_tokens(found)) is not found:
            found.copy_(of_target)
        above = log_probs[level]
    requests_first = (
        torch.from_numpy(np.ascontiguousarray(part.transpose(1, 0, 2)))
        for part in (tokens, back_pointers, log_probs)
    )
    return ExploredNodes(*requests_first)


def _ranked(
    drafter: SearchHead, condition: Tensor, state: Tensor, level: int, shortlist: Shortlist | None
) -> tuple[Array, Array | None]:
    """Logits of the tokens that may follow a level's beams, and these tokens: see `_extend`."""
    if shortlist is None:
        return drafter.logits(condition, state, level).float().numpy(), None
    if level == 0:
        return shortlist.root_logits.float().numpy(), None
    logits = shortlist.logits(drafter.features(condition, state), level)
    return logits.float().numpy(), shortlist.tokens[:, level - 1].numpy()


@compiled
def _extend(
    logits: Array,
    ranked_tokens: Array | None,
    above: Array,
    tokens: Array,
    back_pointers: Array,
    log_probs: Array,
    parent_rows: Array,
) -> None:
    """Grow every request's beams by a level.

    Args:
        logits: [R, P, V] float32, of the tokens that follow each of P beams.
        ranked_tokens: [R, V] int64, the tokens that the logits are of; None for all in order.
        above: [R, P] float32, the beams' log-probabilities.
        tokens, back_pointers: [R, W] int64, written: the W best continuations' tokens, in the
            draft's ids, and beams.
        log_probs: [R, W] float32, written: cumulative, each step's normalised over its 50 best
            tokens; -inf where there are fewer continuations.
        parent_rows: [R * W] int64, written: each beam's parent among all R P of them.
    """
    requests, parents, vocabulary = logits.shape
    width = tokens.shape[1]
    values = np.empty(min(TOP_TOKENS, vocabulary), dtype=np.float32)
    best = np.empty(values.shape[0], dtype=np.int64)
    # A beam of the next level is among its parent's W best, so W candidates of each suffice.
    scores = np.empty(parents * width, dtype=np.float32)
    candidates = np.empty(parents * width, dtype=np.int64)
    chosen = np.empty(width, dtype=np.int64)
    for r in range(requests):
        for parent in range(parents):
            found = top_of_many(logits[r, parent], values, best)
            total = 0.0
            for rank in range(found):
                total += math.exp(values[rank] - values[0])
            for rank in range(width):
                at = parent * width + rank
                scores[at], candidates[at] = -np.inf, 0
                if rank < found:
                    scores[at] = above[r, parent] + values[rank] - values[0] - math.log(total)
                    candidates[at] = best[rank]
        kept = top(scores, log_probs[r], chosen)
        for beam in range(width):
            if beam < kept:
                token = candidates[chosen[beam]]
                tokens[r, beam] = token if ranked_tokens is None else ranked_tokens[r, token]
                back_pointers[r, beam] = chosen[beam] // width
            else:
                tokens[r, beam], back_pointers[r, beam], log_probs[r, beam] = 0, 0, -np.inf
            parent_rows[r * width + beam] = r * parents + back_pointers[r, beam]
