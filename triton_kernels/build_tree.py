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

Where a budget shares verification among the batch's nodes, it needs their scores, and later what
the drafter thought of those that were judged: `ScoredTrees` keeps both in node order. What the next
step asks of a draft besides (`NodeLimits`, `DraftRows`) is written on the way, without launches of
its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vllm_redrafter.config import MAX_NODES, WORD_BITS
from vllm_redrafter.triton_kernels.build_tree_kernels import _finish_trees, _select_nodes
from vllm_redrafter.triton_kernels.checks import (
    require,
    require_last_dim_contiguous,
    require_same_device,
)

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

    def clear(self) -> None:
        """Every tree is its root alone; rows beyond it see the root, as in any built tree."""
        for field in (self.tokens, self.parents, self.depths, self.ancestors):
            field.zero_()
        self.num_nodes.fill_(1)
        self.ancestors[:, :, 0] = 1


class ScoredTrees(TreeBuffers):
    """Trees with what their nodes were selected by.

    Attributes:
        log_probs: [R, K+1] float32, the nodes' scores: 0 for the root, -inf in unused slots.
        log_odds: [R, K+1] float32, the drafter's log-odds of a node given its parent; 0 for the
            root and in unused slots.
        match_lengths: [R, K+1] int32, of the path found in the text that a node is on; 0 for none,
            and in unused slots.
    """

    def __init__(self, max_requests: int, max_nodes: int, device: torch.device | str) -> None:
        super().__init__(max_requests, max_nodes, device)
        self.log_probs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.log_odds = torch.zeros_like(self.log_probs)
        self.match_lengths = torch.zeros_like(self.tokens)

    def clear(self) -> None:
        super().clear()
        self.log_probs.fill_(-torch.inf)
        self.log_probs[:, 0] = 0
        self.log_odds.zero_()
        self.match_lengths.zero_()


class NodeLimits(NamedTuple):
    """What requests ask of their trees.

    Attributes:
        chains: [R] int32, 1 for a chain, 0 for a tree.
        limits: [R] int32, the most nodes that `num_nodes` tells of, the root not counted; the
            others are written nonetheless.
    """

    chains: Tensor
    limits: Tensor


class DraftRows(NamedTuple):
    """What vLLM is told of the trees, in the batch's order.

    Attributes:
        tokens: [R, K] int64, written: the nodes' tokens; 0 in unused slots, since vLLM embeds
            them as well.
        probs: [R, K] float32, written: exp(score) of each node over that of the one before, so
            that a running product gives each node's own; 0 in unused slots and beyond the limit.
            None where the trees have no scores.
    """

    tokens: Tensor
    probs: Tensor | None


def build_tree(
    root_tokens: Tensor,
    tokens: Tensor,
    back_pointers: Tensor,
    log_probs: Tensor,
    out: TreeBuffers,
    entries: Tensor | None = None,
    log_odds: Tensor | None = None,
    node_limits: NodeLimits | None = None,
    rows: DraftRows | None = None,
    match_lengths: Tensor | None = None,
) -> TreeBuffers:
    """The K best candidates of each request as a tree, K by the size of `out`.

    Args:
        root_tokens: [R] int32 or int64.
        tokens: [R, L, W] int32 or int64, contiguous; L * W at most 2048.
        back_pointers: [R, L, W] likewise: the beam of the level above; not read on level 0.
        log_probs: [R, L, W] fp32, cumulative; -inf for no candidate.
        out: at least R requests; the others' entries are left alone.
        entries: [R] int32 or int64, which entry of `out` each request's tree goes to; None for
            the first R in order. Requests that share an entry leave any one of their trees,
            or a mixture: harmless in an entry that nobody reads.
        log_odds: [R, L, W] fp32, contiguous, the drafter's log-odds of each candidate; `out` is
            ScoredTrees then, and has the nodes' scores and log-odds written too. None for neither.
        node_limits: of each request; None for trees without limits. A chain's scores must not rise
            from a parent to its child.
        rows: written; its `probs` need `log_odds` and `node_limits`. None for nothing.
        match_lengths: [R, L, W] int32, contiguous, of the path that each candidate is on, 0 for
            none; `out` is ScoredTrees then, and has them written too. None where there are none.

    Returns:
        out.

    Raises:
        ValueError: an argument's dtype, device, shape or stride does not fit; it is named.
    """
    _check_candidates(root_tokens, tokens, back_pointers, log_probs, out)
    if log_odds is not None:
        _check_by_candidate("log_odds", log_odds, torch.float32, log_probs, out)
    if match_lengths is not None:
        _check_by_candidate("match_lengths", match_lengths, torch.int32, log_probs, out)
    if entries is not None:
        _check_tokens(entries=entries)
        require(
            entries.shape == root_tokens.shape,
            f"entries: expected {list(root_tokens.shape)}, got {list(entries.shape)}",
        )
        require_last_dim_contiguous(entries=entries)
        require_same_device(tokens, entries=entries)
    scored = out if isinstance(out, ScoredTrees) and log_odds is not None else None
    matched = out if isinstance(out, ScoredTrees) and match_lengths is not None else None
    _check_rows(root_tokens, out, scored, node_limits, rows)
    chains, limits = node_limits or (root_tokens, root_tokens)
    probs = rows.probs if rows is not None else None
    has_entries, entries = entries is not None, root_tokens if entries is None else entries
    requests, length, width = tokens.shape
    num, slots = length * width, out.tokens.shape[1]
    block, block_slots = triton.next_power_of_2(num), triton.next_power_of_2(slots)
    chunk = min(block, max(1, 8192 // block))
    _select_nodes[(requests,)](
        root_tokens,
        tokens,
        back_pointers,
        log_probs,
        log_odds if log_odds is not None else log_probs,
        match_lengths if match_lengths is not None else tokens,
        entries,
        chains,
        limits,
        out.tokens,
        out.parents,
        out.depths,
        out.num_nodes,
        scored.log_probs if scored is not None else log_probs,
        scored.log_odds if scored is not None else log_probs,
        matched.match_lengths if matched is not None else out.tokens,
        WIDTH=width,
        NUM=num,
        BLOCK=block,
        CHUNK=chunk,
        SLOTS=slots,
        BLOCK_SLOTS=block_slots,
        HAS_ENTRIES=has_entries,
        HAS_NODE_LIMITS=node_limits is not None,
        HAS_LOG_ODDS=scored is not None,
        HAS_MATCHES=matched is not None,
        # 16 comparisons per thread at a time: 128 would not fit its registers.
        num_warps=max(4, min(16, block * chunk // 512)),
    )
    _finish_trees[(requests,)](
        out.tokens,
        out.parents,
        out.depths,
        scored.log_probs if scored is not None else log_probs,
        entries,
        limits,
        out.ancestors,
        rows.tokens if rows is not None else out.ancestors,
        probs if probs is not None else log_probs,
        SLOTS=slots,
        BLOCK_SLOTS=block_slots,
        WORDS=out.ancestors.shape[2],
        HAS_ENTRIES=has_entries,
        HAS_ROWS=rows is not None,
        HAS_PROBS=probs is not None,
        num_warps=1 if block_slots <= 32 else 4,
    )
    return out


def _check_tokens(**tensors: Tensor) -> None:
    """Each tensor holds token ids, int32 or int64; the first that does not is named."""
    for name, tensor in tensors.items():
        require(
            tensor.dtype in (torch.int32, torch.int64),
            f"{name}: expected int32 or int64, got {tensor.dtype}",
        )


def _check_requests(name: str, root_tokens: Tensor, tokens: Tensor, out: TreeBuffers) -> None:
    """Root tokens, candidates and `out` are of as many requests, on one device.

    Args:
        name: of `tokens`, in messages.
        root_tokens: [R].
        tokens: [R, L, W] or [R, W, L].
        out: at least R requests.

    Raises:
        ValueError: they do not fit, or there are too many candidates.
    """
    candidates = tokens.shape[1] * tokens.shape[2]
    require(
        candidates <= MAX_CANDIDATES,
        f"{name}: {candidates} candidates per request, at most {MAX_CANDIDATES} are supported",
    )
    require(
        root_tokens.shape == tokens.shape[:1] and tokens.shape[0] <= out.tokens.shape[0],
        f"root_tokens: {list(root_tokens.shape)} and out's {out.tokens.shape[0]} requests do not "
        f"fit {name}' {tokens.shape[0]}",
    )
    require_last_dim_contiguous(root_tokens=root_tokens)
    require_same_device(tokens, root_tokens=root_tokens, out=out.tokens)


def _check_candidates(
    root_tokens: Tensor,
    tokens: Tensor,
    back_pointers: Tensor,
    log_probs: Tensor,
    out: TreeBuffers,
) -> None:
    _check_tokens(root_tokens=root_tokens, tokens=tokens, back_pointers=back_pointers)
    require(log_probs.dtype == torch.float32, f"log_probs: expected fp32, got {log_probs.dtype}")
    require(tokens.dim() == 3, f"tokens: expected [R, L, W], got {list(tokens.shape)}")
    for name, tensor in {
        "tokens": tokens,
        "back_pointers": back_pointers,
        "log_probs": log_probs,
    }.items():
        require(
            tensor.shape == tokens.shape and tensor.is_contiguous(),
            f"{name}: must be contiguous and of shape {list(tokens.shape)}, "
            f"got {list(tensor.shape)}",
        )
    _check_requests("tokens", root_tokens, tokens, out)
    require_same_device(tokens, back_pointers=back_pointers, log_probs=log_probs)


def _check_by_candidate(
    name: str, tensor: Tensor, dtype: torch.dtype, log_probs: Tensor, out: TreeBuffers
) -> None:
    require(
        tensor.dtype == dtype and tensor.shape == log_probs.shape and tensor.is_contiguous(),
        f"{name}: must be contiguous {dtype} of shape {list(log_probs.shape)}, got "
        f"{list(tensor.shape)} {tensor.dtype}",
    )
    require(isinstance(out, ScoredTrees), f"out: must be ScoredTrees where {name} are given")
    require_same_device(log_probs, **{name: tensor})


def _check_rows(
    root_tokens: Tensor,
    out: TreeBuffers,
    scored: ScoredTrees | None,
    node_limits: NodeLimits | None,
    rows: DraftRows | None,
) -> None:
    requests, nodes = root_tokens.shape[0], out.tokens.shape[1] - 1
    expected: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = []
    if node_limits is not None:
        expected.append(("node_limits.chains", node_limits.chains, (requests,), torch.int32))
        expected.append(("node_limits.limits", node_limits.limits, (requests,), torch.int32))
    if rows is not None:
        expected.append(("rows.tokens", rows.tokens, (requests, nodes), torch.int64))
        if rows.probs is not None:
            require(
                scored is not None and node_limits is not None,
                "rows.probs: need log_odds, ScoredTrees to keep the scores, and node_limits",
            )
            expected.append(("rows.probs", rows.probs, (requests, nodes), torch.float32))
    for name, tensor, shape, dtype in expected:
        require(
            tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous(),
            f"{name}: must be contiguous {dtype} of shape {list(shape)}, got "
            f"{list(tensor.shape)} {tensor.dtype}",
        )
        require_same_device(root_tokens, **{name: tensor})
