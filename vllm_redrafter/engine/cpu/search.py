"""Beam search on the host: `beam_search.py`, with what is no matrix product in one pass per level.

Between its products a search is many calls of torch on a few dozen numbers; numba compiles them,
as `ranking.py` says. The products stay vLLM's (`packed_weights.py`). A test holds the two searches
equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.heads.head import SearchHead
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.compiled import compiled

Array = npt.NDArray[Any]

FOLDS = 32
"""Values of a column that `top_of_many` looks at together."""


@torch.inference_mode()
def search(
    drafter: SearchHead,
    embed: Callable[[Tensor], Tensor],
    hidden: Tensor,
    root_tokens: Tensor,
    shape: SearchShape,
) -> ExploredNodes:
    """See `beam_search.beam_search`."""
    requests, (width, length) = len(root_tokens), shape
    tokens = np.zeros((length, requests, width), dtype=np.int64)
    back_pointers = np.zeros((length, requests, width), dtype=np.int64)
    log_probs = np.zeros((length, requests, width), dtype=np.float32)
    # Of each beam, the row of its parent among all beams of the level above.
    parents = np.zeros(requests * width, dtype=np.int64)
    condition = drafter.condition(hidden).unsqueeze(1)
    # The first level has one beam, the root itself; only from the second on are there W.
    state = drafter.start(condition, embed(root_tokens.unsqueeze(1)))
    above = np.zeros((requests, 1), dtype=np.float32)
    for level in range(length):
        if level:
            if width > 1:
                of_beams = state.flatten(0, 1).index_select(0, torch.from_numpy(parents))
                state = of_beams.view(requests, width, -1)
            state = drafter.advance(state, embed(torch.from_numpy(tokens[level - 1])))
        logits = drafter.logits(condition, state, level).float().numpy()
        _extend(logits, above, tokens[level], back_pointers[level], log_probs[level], parents)
        found = torch.from_numpy(tokens[level])
        if (of_target := drafter.target_tokens(found)) is not found:
            found.copy_(of_target)
        above = log_probs[level]
    requests_first = (
        torch.from_numpy(np.ascontiguousarray(part.transpose(1, 0, 2)))
        for part in (tokens, back_pointers, log_probs)
    )
    return ExploredNodes(*requests_first)


@compiled
def _extend(
    logits: Array,
    above: Array,
    tokens: Array,
    back_pointers: Array,
    log_probs: Array,
    parent_rows: Array,
) -> None:
    """Grow every request's beams by a level.

    Args:
        logits: [R, P, V] float32, of the tokens that follow each of P beams; [R, 1, V] of a head
            that sees no drafted token, where they are the same for all.
        above: [R, P] float32, the beams' log-probabilities.
        tokens, back_pointers: [R, W] int64, written: the W best continuations' tokens, in the
            draft's ids, and beams.
        log_probs: [R, W] float32, written: cumulative, each step's normalised over its 50 best
            tokens; -inf where there are fewer continuations.
        parent_rows: [R * W] int64, written: each beam's parent among all R P of them.
    """
    requests, ranked, vocabulary = logits.shape
    parents, width = above.shape[1], tokens.shape[1]
    values = np.empty(min(TOP_TOKENS, vocabulary), dtype=np.float32)
    best = np.empty(values.shape[0], dtype=np.int64)
    # A beam of the next level is among its parent's W best, so W candidates of each suffice.
    scores = np.empty(parents * width, dtype=np.float32)
    candidates = np.empty(parents * width, dtype=np.int64)
    chosen = np.empty(width, dtype=np.int64)
    found, total = 0, 0.0
    for r in range(requests):
        for parent in range(parents):
            if parent < ranked:
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
        kept = _top(scores, log_probs[r], chosen)
        for beam in range(width):
            if beam < kept:
                tokens[r, beam] = candidates[chosen[beam]]
                back_pointers[r, beam] = chosen[beam] // width
            else:
                tokens[r, beam], back_pointers[r, beam], log_probs[r, beam] = 0, 0, -np.inf
            parent_rows[r * width + beam] = r * parents + back_pointers[r, beam]


@compiled
def top_of_many(values: Array, best: Array, index: Array) -> int:
    """The N largest of many values, where comparing them one by one would take too long.

    Args:
        values: those that are NaN or -inf are left out.
        best: [N], written: the largest, descending.
        index: [N] int64, written: where they stand; of equal ones the first comes first.

    Returns:
        How many there are, at most N.

    Values stand in columns, FOLDS to each. Of N columns with the largest maxima each has a value at
    least as large as the least of these maxima: what is below that is not among the N largest. The
    maxima are found by vector instructions, and few columns are left to look through.
    """
    most, size = best.shape[0], values.shape[0]
    columns = size // FOLDS
    if columns < 2 * most:
        return _top(values, best, index)
    maxima = np.full(columns, -np.inf, dtype=values.dtype)
    for start in range(0, size, columns):
        fold = values[start : start + columns]
        for column in range(fold.shape[0]):
            maxima[column] = _larger(maxima[column], fold[column])
    if _top(maxima, best, index) < most:
        return _top(values, best, index)
    least = best[most - 1]
    kept = np.flatnonzero(maxima >= least)
    candidates = np.empty(kept.shape[0] * (FOLDS + 1), dtype=np.int64)
    count = 0
    for start in range(0, size, columns):
        for column in kept:
            # The last fold may be shorter.
            if start + column < size and values[start + column] >= least:
                candidates[count] = start + column
                count += 1
    found = _top(values[candidates[:count]], best, index)
    index[:found] = candidates[index[:found]]
    return found


@compiled
def _larger(a: float, b: float) -> float:
    """Not `max`, which numba does value by value, as it asks for NaN: here that is not larger."""
    return b if b > a else a


@compiled
def _top(values: Array, best: Array, index: Array) -> int:
    """The N largest of some values above -inf, into `best` and `index` [N]; how many there are.

    Descending; of equal ones the first comes first. Most values are below the N-th best so far,
    and cost one comparison.
    """
    most = best.shape[0]
    count = 0
    least = -np.inf
    for at in range(values.shape[0]):
        value = values[at]
        if value > least:
            place = min(count, most - 1)
            while place > 0 and best[place - 1] < value:
                best[place], index[place] = best[place - 1], index[place - 1]
                place -= 1
            best[place], index[place] = value, at
            count = min(count + 1, most)
            if count == most:
                least = best[most - 1]
    return count
