"""Tokens per target step, estimated offline: no engine, only text that the target wrote greedily.

Greedy text makes the acceptance walk deterministic: the token that the target draws at a node of
the true path is the next token of the text. So the engine's steps can be replayed: search, build
the tree, walk it along the text, jump behind what was accepted, search again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.beam_search import beam_search
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.scorer import accept_path
from vllm_redrafter.token_tree import TokenTree
from vllm_redrafter.training.data import TokenBlocks
from vllm_redrafter.training.target import read_target


@dataclass(frozen=True)
class Acceptance:
    """What replayed decoding needed: target steps, and tokens that they output."""

    steps: int
    tokens: int

    @property
    def tokens_per_step(self) -> float:
        """1 is plain decoding, which is also what no steps at all count as."""
        return self.tokens / self.steps if self.steps else 1.0


def estimate_acceptance(
    drafter: Drafter,
    target: Any,
    blocks: TokenBlocks,
    config: ReDrafterConfig,
    batch_size: int = 64,
) -> Acceptance:
    """Replay the decoding of target-written text.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text, greedily.
        blocks: the text; each block's generated part is one answer.
        config: beam width, beam length, K and kind of tree.
        batch_size: blocks read by the target at once.
    """
    steps = tokens = 0
    embed = target.get_input_embeddings()
    for batch in blocks.batches(batch_size):
        hidden = read_target(target, batch.tokens, with_logits=False).hidden
        part = replay(drafter, embed, hidden, batch, config)
        steps, tokens = steps + part.steps, tokens + part.tokens
    return Acceptance(steps, tokens)


def replay(
    drafter: Drafter,
    embed: Callable[[Tensor], Tensor],
    hidden: Tensor,
    blocks: TokenBlocks,
    config: ReDrafterConfig,
) -> Acceptance:
    """Decode all blocks at once by jumps, as the engine would.

    The first token of an answer comes from the prefill; the steps that follow output the rest.
    As in the engine, the last step's tokens beyond the end of the answer do not count.

    Args:
        drafter: the draft head.
        embed: the target's input embedding.
        hidden: [N, T, H], the target's hidden states for `blocks`.
        blocks: N answers, each in one piece and with at least one token before it.
        config: beam width, beam length, K and kind of tree.
    """
    last = blocks.lengths - 1
    root = torch.where(last >= 0, blocks.generated.int().argmax(dim=1), last)
    steps = tokens = 0
    while (rows := (root < last).nonzero().squeeze(1)).numel():
        accepted = _accepted_depth(drafter, embed, hidden, blocks.tokens, rows, root, last, config)
        output = torch.minimum(accepted + 1, (last - root)[rows])
        root[rows] += output
        steps, tokens = steps + rows.numel(), tokens + int(output.sum())
    return Acceptance(steps, tokens)


def _accepted_depth(
    drafter: Drafter,
    embed: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    rows: Tensor,
    root: Tensor,
    last: Tensor,
    config: ReDrafterConfig,
) -> Tensor:
    """How many draft tokens [rows] one step accepts from the roots at tokens[row, root[row]]."""
    at, end = root[rows], last[rows]
    root_tokens = tokens[rows, at]
    explored = beam_search(
        drafter, embed, hidden[rows, at - 1], root_tokens, config.beam_width, config.beam_length
    )
    tree = TokenTree.from_explored(
        root_tokens, explored, config.num_speculative_tokens, tree=config.tree
    )
    # What the target draws at a node: right on the true path, and not read off it.
    following = at.unsqueeze(1) + tree.depths.long() + 1
    sampled = tokens[rows.unsqueeze(1), following.clamp(max=tokens.shape[1] - 1)]
    sampled = sampled.masked_fill(following > end.unsqueeze(1), -1)
    return accept_path(tree, sampled).num_sampled.long() - 1
