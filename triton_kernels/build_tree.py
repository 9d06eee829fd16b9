# SPDX-License-Identifier: Apache-2.0
"""From beam search's candidates to a TokenTree of the K best, on the device.

A candidate (level l, beam w) of R requests has a token, the beam of the level above that it grew
from, and a cumulative log-probability; -inf marks one that is none. Its rank is the number of
candidates before it in the order "more probable first, ties by level, then by beam":

    rank(i) = |{ j : p_j > p_i, or p_j = p_i and j < i }|,    candidates numbered level by level

Ranks 0 .. K-1 become nodes 1 .. K. A parent is never less probable than its child and stands on an
earlier level, so this order is topological and every prefix of it is a tree.

A request that needs a chain gets the path instead of which the most tokens are expected, that is
the greatest sum of p over its nodes; they rank by level.

Where a budget shares verification among the batch's nodes, it needs their probabilities, and later
what the drafter thought of those that were judged: `ScoredTrees` keeps both in node order. What the
next step asks of a draft besides is written on the way, without launches of its own.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vllm_redrafter.config import MAX_NODES, WORD_BITS
from vllm_redrafter.triton_kernels.build_tree_kernels import _finish_trees, _select_nodes
from vllm_redrafter.triton_kernels.checks import require, require_layout

MAX_CANDIDATES = 2048


class TreeBuffers:
    """What a tree build writes, allocated once: contiguous, fixed in shape.

    Attributes:
        tokens, parents, depths: [R, K+1] int32, as in TokenTree.
        num_nodes: [R] int32.
        ancestors: [R, K+1, words] int32 bit sets.
    """

    def __init__(self, max_requests: int, max_nodes: int, device: torch.device | str) -> None:
        """Room for R = max_requests trees of K = max_nodes nodes besides the root (at most 127)."""
        require(
            1 <= max_nodes < MAX_NODES,
            f"max_nodes must be 1 to {MAX_NODES - 1} besides the root, got {max_nodes}",
        )
        slots = max_nodes + 1
        shape = (max_requests, slots)

        def buffer(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.tokens, self.parents, self.depths = buffer(*shape), buffer(*shape), buffer(*shape)
        self.num_nodes = buffer(max_requests)
        self.ancestors = buffer(*shape, triton.cdiv(slots, WORD_BITS))

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """Tokens, parents, depths, ancestors and numbers of nodes, as kernels take them."""
        return self.tokens, self.parents, self.depths, self.ancestors, self.num_nodes

    def clear(self) -> None:
        """Every tree is its root alone; rows beyond it see the root, as in any built tree."""
        for field in self.fields:
            field.zero_()
        self.num_nodes.fill_(1)
        self.ancestors[:, :, 0] = 1


class ScoredTrees(TreeBuffers):
    """Trees with what their nodes were selected by.

    Attributes:
        log_probs: [R, K+1] float32, the nodes' scores: 0 for the root, -inf in unused slots.
        log_odds: [R, K+1] float32, the drafter's log-odds of a node given its parent; 0 for the
            root and in unused slots.
        match_classes: [R, K+1] int32, of nodes on paths (see `ContextMatches`); 0 for others, and
            in unused slots.
        probs: [R, K+1] float32, exp(score) of each node over that of the one before, so that a
            running product gives each node's own; 0 in unused slots and beyond the limit. Its
            first column is not written.
        shown: [2, R, K+1] int32, the memory of `depths` and `probs`, for one copy to the host.
    """

    def __init__(self, max_requests: int, max_nodes: int, device: torch.device | str) -> None:
        super().__init__(max_requests, max_nodes, device)
        self.log_probs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.log_odds = torch.zeros_like(self.log_probs)
        self.match_classes = torch.zeros_like(self.tokens)
        self.shown = torch.zeros(2, *self.tokens.shape, dtype=torch.int32, device=device)
        self.depths, self.probs = self.shown[0], self.shown[1].view(torch.float32)

    def clear(self) -> None:
        super().clear()
        self.log_probs.fill_(-torch.inf)
        self.log_probs[:, 0] = 0
        self.log_odds.zero_()
        self.match_classes.zero_()


class NodeLimits(NamedTuple):
    """What requests ask of their trees, by entry of what is built.

    Attributes:
        chains: [entries] int32, 1 for a chain, 0 for a tree.
        limits: [entries] int32, the most nodes that `num_nodes` tells of, the root not counted; the
            others are written nonetheless.
    """

    chains: Tensor
    limits: Tensor


def build_tree(
    root_tokens: Tensor,
    tokens: Tensor,
    back_pointers: Tensor,
    log_probs: Tensor,
    out: ScoredTrees,
    entries: Tensor,
    node_limits: NodeLimits,
    drafts: Tensor,
    log_odds: Tensor | None = None,
    match_classes: Tensor | None = None,
) -> None:
    """The K best candidates of each request as a tree, K by the size of `out`.

    Args:
        root_tokens: [R] int64.
        tokens: [R, L, W] int64, contiguous; L * W at most 2048.
        back_pointers: [R, L, W] likewise: the beam of the level above; not read on level 0.
        log_probs: [R, L, W] fp32, cumulative; -inf for no candidate.
        out: written, but for the entries of no request.
        entries: [R] int64, which entry of `out` each request's tree goes to. Requests that share
            an entry leave any one of their trees, or a mixture: harmless in an entry that nobody
            reads.
        node_limits: of each entry. A chain's scores must not rise from a parent to its child.
        drafts: [R, K] int64, written: the nodes' tokens; 0 in unused slots, since vLLM embeds them
            as well.
        log_odds: [R, L, W] fp32, contiguous, the drafter's log-odds of each candidate; None where
            nobody asks for those of nodes, which are then left alone.
        match_classes: [R, L, W] int32, contiguous, of candidates on paths, 0 for others; None
            likewise.
    """
    require(tokens.dim() == 3, f"tokens: expected [R, L, W], got {list(tokens.shape)}")
    (requests, length, width), (most, slots) = tokens.shape, out.tokens.shape
    num, shape = length * width, (requests, length, width)
    require(
        num <= MAX_CANDIDATES,
        f"tokens: {num} candidates per request, at most {MAX_CANDIDATES} are supported",
    )
    has_odds, has_matches = log_odds is not None, match_classes is not None
    log_odds = log_odds if log_odds is not None else log_probs
    matches = match_classes if match_classes is not None else tokens
    require_layout(
        tokens.device,
        root_tokens=(root_tokens, torch.int64, (requests,)),
        tokens=(tokens, torch.int64, shape),
        back_pointers=(back_pointers, torch.int64, shape),
        log_probs=(log_probs, torch.float32, shape),
        out=(out.tokens, torch.int32, (1, slots)),
        entries=(entries, torch.int64, (requests,)),
        log_odds=(log_odds, torch.float32, shape),
        match_classes=(matches, torch.int32 if has_matches else torch.int64, shape),
        chains=(node_limits.chains, torch.int32, (most,)),
        limits=(node_limits.limits, torch.int32, (most,)),
        drafts=(drafts, torch.int64, (requests, slots - 1)),
    )
    block, block_slots = triton.next_power_of_2(num), triton.next_power_of_2(slots)
    chunk = min(block, max(1, 8192 // block))
    _select_nodes[(requests,)](
        *(root_tokens, tokens, back_pointers, log_probs, log_odds, matches, entries),
        *node_limits,
        *(out.tokens, out.parents, out.depths, out.num_nodes),
        *(out.log_probs, out.log_odds, out.match_classes),
        WIDTH=width,
        NUM=num,
        BLOCK=block,
        CHUNK=chunk,
        SLOTS=slots,
        BLOCK_SLOTS=block_slots,
        HAS_LOG_ODDS=has_odds,
        HAS_MATCHES=has_matches,
        # 16 comparisons per thread at a time: 128 would not fit its registers.
        num_warps=max(4, min(16, block * chunk // 512)),
    )
    _finish_trees[(requests,)](
        *(out.tokens, out.parents, out.depths, out.log_probs, entries, node_limits.limits),
        *(out.ancestors, drafts, out.probs),
        SLOTS=slots,
        BLOCK_SLOTS=block_slots,
        WORDS=out.ancestors.shape[2],
        num_warps=1 if block_slots <= 32 else 4,
    )
