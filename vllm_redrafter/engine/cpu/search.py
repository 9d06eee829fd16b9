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

from vllm_redrafter.beam_search import ExploredNodes
from vllm_redrafter.compiled import compiled
from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.heads.head import SearchHead
from vllm_redrafter.policy import SearchShape

Array = npt.NDArray[Any]


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
    tokens = torch.zeros(length, requests, width, dtype=torch.int64)
    back_pointers = torch.zeros(length, requests, width, dtype=torch.int64)
    log_probs = torch.zeros(length, requests, width)
    condition = drafter.condition(hidden).unsqueeze(1)
    # The first level has one beam, the root itself; only from the second on are there W.
    state = drafter.start(condition, embed(root_tokens.unsqueeze(1)))
    above = np.zeros((requests, 1), dtype=np.float32)
    for level in range(length):
        if level:
            beams = torch.from_numpy(_rows(back_pointers[level - 1].numpy(), state.shape[1]))
            state = state.flatten(0, 1).index_select(0, beams).view(requests, width, -1)
            state = drafter.advance(state, embed(tokens[level - 1]))
            above = log_probs[level - 1].numpy()
        logits = drafter.logits(condition, state, level).float().numpy()
        found = (tokens[level], back_pointers[level], log_probs[level])
        _extend(logits, above, *(part.numpy() for part in found))
        # Where there is no draft vocabulary, it copies onto itself.
        tokens[level] = drafter.target_tokens(tokens[level])
    levels_second = (
        part.transpose(0, 1).contiguous() for part in (tokens, back_pointers, log_probs)
    )
    return ExploredNodes(*levels_second)


@compiled
def _rows(back_pointers: Array, beams_above: int) -> Array:
    """[R * W] int64, the flat row of each beam's parent among those of the level above."""
    requests, width = back_pointers.shape
    rows = np.empty(requests * width, dtype=np.int64)
    for r in range(requests):
        for beam in range(width):
            rows[r * width + beam] = r * beams_above + back_pointers[r, beam]
    return rows


@compiled
def _extend(
    logits: Array, above: Array, tokens: Array, back_pointers: Array, log_probs: Array
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
                found = _top(logits[r, parent], values, best)
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
