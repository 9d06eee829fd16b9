# SPDX-License-Identifier: Apache-2.0
"""Beam search over the draft head: ReDrafter (arXiv 2403.09919), section 3.2.

Beams are back-pointers, never copies: a prefix that two beams share is stored once, and the token
tree may be of everything that the search explored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.heads.head import SearchHead
from vllm_redrafter.heads.shortlist import Shortlist
from vllm_redrafter.tree.sharding import VocabularyShard


@dataclass(frozen=True)
class ExploredNodes:
    """What a beam search visited: R requests, L levels, W beams per level, best beam first.

    Attributes:
        tokens: [R, L, W] int64.
        back_pointers: [R, L, W] int64, the parent's beam on the level above; 0 on the first.
        log_probs: [R, L, W] float32, cumulative; -inf marks a slot that no beam fills.
    """

    tokens: Tensor
    back_pointers: Tensor
    log_probs: Tensor


def log_softmax_of_top(
    logits: Tensor, num: int, shard: VocabularyShard | None = None, candidates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `num` best tokens, with log-probabilities normalised over the top 50 alone.

    Equal to the log-softmax with all but the top 50 masked (Apple's `warp_logits`).

    Args:
        logits: [..., V], or of the shard's tokens alone.
        num: how many to return; at most 50.
        shard: the part of the draft vocabulary that the logits are of; None for all of it.
        candidates: [..., V] int64, the tokens that the logits are of; None for all in order.

    Returns:
        (log-probabilities [..., num] float32 in descending order, tokens [..., num] int64);
        where V < num, the missing entries are -inf and token 0.
    """
    if shard is not None:
        values, tokens = shard.top(logits, candidates)
    else:
        values, tokens = logits.topk(min(TOP_TOKENS, logits.shape[-1]), dim=-1)
        if candidates is not None:
            tokens = candidates.expand_as(logits).gather(-1, tokens)
    log_probs = values.float().log_softmax(dim=-1)
    missing = num - log_probs.shape[-1]
    if missing > 0:
        log_probs = torch.nn.functional.pad(log_probs, (0, missing), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, missing))
    return log_probs[..., :num], tokens[..., :num]


@torch.inference_mode()
def beam_search(
    drafter: SearchHead,
    embed: Callable[[Tensor], Tensor],
    hidden: Tensor,
    root_tokens: Tensor,
    beam_width: int,
    beam_length: int,
    shard: VocabularyShard | None = None,
    candidates: int = 0,
    continued: int | None = None,
) -> ExploredNodes:
    """Search W beams of L tokens below the root, for all requests at once.

    Args:
        drafter: the draft head.
        embed: the target's input embedding, tokens [...] int64 -> [..., H].
        hidden: [R, (1 + n) H], the target's states that predicted the root; see `condition`.
        root_tokens: [R] int64, the last sampled token.
        beam_width, beam_length: W and L.
        shard: the part of the draft vocabulary that the drafter has; None for all of it.
        candidates: C, how many tokens the nodes of each level below the first choose from; 0 for
            the draft vocabulary. With a shard, each rank has as many of its own.
        continued: how many beams of a level go on to the next one; None for all W.

    Returns:
        The explored nodes, [R, L, W], in the target's token ids.
    """
    condition = drafter.condition(hidden).unsqueeze(1)
    state = drafter.start(condition, drafter.embedding_of(embed, 0)(root_tokens.unsqueeze(1)))
    shortlist = drafter.shortlist(condition, state, beam_length, candidates) if candidates else None
    scores, tokens = _best(drafter, condition, state, 0, shortlist, beam_width, shard)
    log_probs, tokens = scores.squeeze(1), drafter.target_tokens(tokens.squeeze(1))
    back_pointers = torch.zeros_like(tokens)
    levels = [(tokens, back_pointers, log_probs)]

    for depth in range(1, beam_length):
        parent = back_pointers[:, :continued, None].expand(-1, -1, state.shape[-1])
        embedded = drafter.embedding_of(embed, depth)(tokens[:, :continued])
        state = drafter.advance(state.gather(1, parent), embedded, depth)
        # A beam of the next level is among its parent's W best, so W x W continuations suffice.
        scores, following = _best(drafter, condition, state, depth, shortlist, beam_width, shard)
        scores = scores + log_probs[:, :continued, None]
        log_probs, best = scores.flatten(1).topk(beam_width, dim=1)
        tokens = drafter.target_tokens(following.flatten(1).gather(1, best))
        back_pointers = best // beam_width
        levels.append((tokens, back_pointers, log_probs))

    stacked = [torch.stack(parts, dim=1) for parts in zip(*levels, strict=True)]
    return ExploredNodes(*stacked)


def _best(
    drafter: SearchHead,
    condition: Tensor,
    state: Tensor,
    depth: int,
    shortlist: Shortlist | None,
    num: int,
    shard: VocabularyShard | None,
) -> tuple[Tensor, Tensor]:
    if shortlist is None:
        return log_softmax_of_top(drafter.logits(condition, state, depth), num, shard)
    if depth == 0:
        return log_softmax_of_top(shortlist.root_logits, num, shard)
    logits = shortlist.logits(drafter.features(condition, state), depth)
    return log_softmax_of_top(logits, num, shard, shortlist.tokens[:, depth - 1].unsqueeze(1))
