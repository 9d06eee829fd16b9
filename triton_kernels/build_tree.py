"""From beam search's candidates to a TokenTree of the K best, on the device.

A candidate (level l, beam w) of R requests has a token, the beam of the level above that it grew
from, and a cumulative log-probability; -inf marks one that is none. Its rank is the number of
candidates before it in the order "more probable first, ties by level, then by beam":

    rank(i) = |{ j : p_j > p_i, or p_j = p_i and j < i }|,    candidates numbered level by level

Ranks 0 .. K-1 become nodes 1 .. K. A parent is never less probable than its child and stands on an
earlier level, so this order is topological and every prefix of it is a tree.

A request that needs a chain gets its best finished beam instead, whose nodes rank by level.

Where a budget shares verification among the batch's nodes, it needs their scores, and later what
the drafter thought of those that were judged: `ScoredTrees` keeps both in node order. What the next
step asks of a draft besides (`Wishes`, `DraftRows`) is written on the way, without launches of its
own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import MAX_NODES, WORD_BITS
from vllm_redrafter.triton_kernels.checks import (
    require,
    require_last_dim_contiguous,
    require_same_device,
)

MAX_CANDIDATES = 2048


@triton.jit
def _rank(
    scores,  # [BLOCK] fp32 values
    index,  # [BLOCK] int32 values
    scores_ptr,  # [NUM] fp32, all candidates of the request
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many of the request's candidates stand before (scores, index), both [BLOCK]."""
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, NUM, CHUNK):
        other = start + tl.arange(0, CHUNK)
        others = tl.load(scores_ptr + other, mask=other < NUM, other=float("-inf"))
        before = (others[None, :] > scores[:, None]) | (
            (others[None, :] == scores[:, None]) & (other[None, :] < index[:, None])
        )
        before = before & (other < NUM)[None, :]
        rank += tl.sum(before.to(tl.int32), axis=1)
    return rank


@triton.jit
def _is_on_best_beam(
    index,  # [BLOCK] int32 values
    back_pointers_ptr,  # [NUM], of the request
    scores_ptr,  # [NUM] fp32, likewise
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
):
    """Which candidates the best beam of the last level passes through; none if it is dead."""
    at = tl.full([], NUM - WIDTH, tl.int32)
    is_on = index < 0
    if tl.load(scores_ptr + at) > float("-inf"):
        for _ in range(NUM // WIDTH):
            is_on = is_on | (index == at)
            beam_above = tl.load(back_pointers_ptr + at).to(tl.int32)
            # On level 0, where back-pointers say nothing, the climb ends.
            at = tl.where(at < WIDTH, at, (at // WIDTH - 1) * WIDTH + beam_above)
    return is_on


@triton.jit
def _select_nodes(
    root_tokens,  # [R] int32 or int64
    tokens,  # [R, L, WIDTH] int32 or int64
    back_pointers,  # [R, L, WIDTH] int32 or int64
    log_probs,  # [R, L, WIDTH] fp32
    odds,  # [R, L, WIDTH] fp32; read where HAS_ODDS
    entries,  # [R] int32 or int64; read where HAS_ENTRIES
    chains,  # [R] int32; read where HAS_WISHES
    limits,  # [R] int32; likewise
    out_tokens,  # [entries, SLOTS] int32, written
    out_parents,  # [entries, SLOTS] int32, written
    out_depths,  # [entries, SLOTS] int32, written
    out_num_nodes,  # [entries] int32, written
    out_log_probs,  # [entries, SLOTS] fp32, written where HAS_ODDS
    out_odds,  # [entries, SLOTS] fp32, written where HAS_ODDS
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    HAS_WISHES: tl.constexpr,
    HAS_ODDS: tl.constexpr,
):
    """One request: rank the candidates, write the best as nodes, blank the unused slots."""
    request = tl.program_id(0)
    entry = tl.load(entries + request).to(tl.int32) if HAS_ENTRIES else request
    scores_ptr = log_probs + request * NUM
    index = tl.arange(0, BLOCK)
    is_candidate = index < NUM
    scores = tl.load(scores_ptr + index, mask=is_candidate, other=float("-inf"))
    level = index // WIDTH
    rank = _rank(scores, index, scores_ptr, NUM, BLOCK, CHUNK)
    if HAS_WISHES:
        wants_chain = tl.load(chains + request) != 0
        if wants_chain:
            is_on = _is_on_best_beam(index, back_pointers + request * NUM, scores_ptr, WIDTH, NUM)
            rank = tl.where(is_on, level, SLOTS)
    is_node = is_candidate & (scores > float("-inf")) & (rank < SLOTS - 1)

    beam_above = tl.load(back_pointers + request * NUM + index, mask=is_node, other=0)
    parent = (level - 1) * WIDTH + beam_above.to(tl.int32)
    has_parent = is_node & (level > 0)
    parent_scores = tl.load(scores_ptr + parent, mask=has_parent, other=float("-inf"))
    parent_rank = _rank(parent_scores, parent, scores_ptr, NUM, BLOCK, CHUNK)
    if HAS_WISHES:
        parent_rank = tl.where(wants_chain, level - 1, parent_rank)

    at = entry * SLOTS + rank + 1
    token = tl.load(tokens + request * NUM + index, mask=is_node, other=0)
    tl.store(out_tokens + at, token.to(tl.int32), mask=is_node)
    tl.store(out_parents + at, tl.where(has_parent, parent_rank + 1, 0), mask=is_node)
    tl.store(out_depths + at, level + 1, mask=is_node)
    if HAS_ODDS:
        tl.store(out_log_probs + at, scores, mask=is_node)
        own_odds = tl.load(odds + request * NUM + index, mask=is_node, other=0.0)
        tl.store(out_odds + at, own_odds, mask=is_node)

    num_nodes = tl.sum(is_node.to(tl.int32), axis=0) + 1
    slot = tl.arange(0, BLOCK_SLOTS)
    unused = (slot >= num_nodes) & (slot < SLOTS)
    tl.store(out_tokens + entry * SLOTS + slot, -1, mask=unused)
    tl.store(out_parents + entry * SLOTS + slot, 0, mask=unused | (slot == 0))
    tl.store(out_depths + entry * SLOTS + slot, 0, mask=unused | (slot == 0))
    tl.store(out_tokens + entry * SLOTS, tl.load(root_tokens + request).to(tl.int32))
    if HAS_WISHES:
        num_nodes = tl.minimum(num_nodes, tl.load(limits + request) + 1)
    tl.store(out_num_nodes + entry, num_nodes)
    if HAS_ODDS:
        no_score = tl.where(slot == 0, 0.0, float("-inf"))
        tl.store(out_log_probs + entry * SLOTS + slot, no_score, mask=unused | (slot == 0))
        tl.store(
            out_odds + entry * SLOTS + slot,
            tl.zeros([BLOCK_SLOTS], tl.float32),
            mask=unused | (slot == 0),
        )


@triton.jit
def _finish_trees(
    tokens,  # [entries, SLOTS] int32; read where HAS_ROWS
    parents,  # [entries, SLOTS] int32
    depths,  # [entries, SLOTS] int32
    log_probs,  # [entries, SLOTS] fp32; read where HAS_PROBS
    entries,  # [R] int32 or int64; read where HAS_ENTRIES
    limits,  # [R] int32; read where HAS_PROBS
    ancestors,  # [entries, SLOTS, WORDS] int32, written
    out_drafts,  # [R, SLOTS - 1] int64, written where HAS_ROWS
    out_probs,  # [R, SLOTS - 1] fp32, written where HAS_PROBS
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_PROBS: tl.constexpr,
):
    """One request: each node climbs to its root and sets a bit per node on the way.

    What is asked about the nodes in their order is read off, too.
    """
    request = tl.program_id(0)
    entry = tl.load(entries + request).to(tl.int32) if HAS_ENTRIES else request
    slot = tl.arange(0, BLOCK_SLOTS)
    is_slot = slot < SLOTS
    deepest = tl.max(tl.load(depths + entry * SLOTS + slot, mask=is_slot, other=0), axis=0)
    for word in tl.static_range(WORDS):
        bits = tl.zeros([BLOCK_SLOTS], dtype=tl.int32)
        node = slot
        # At least one step: the root is the parent of unused slots too.
        for _ in range(tl.maximum(deepest, 1) + 1):
            bit = tl.full([BLOCK_SLOTS], 1, dtype=tl.int32) << (node % 32)
            bits = bits | tl.where(node // 32 == word, bit, 0)
            node = tl.load(parents + entry * SLOTS + node, mask=is_slot, other=0)
        at = (entry * SLOTS + slot) * WORDS + word
        tl.store(ancestors + at, bits, mask=is_slot)
    is_drafted = is_slot & (slot > 0)
    to = request * (SLOTS - 1) + slot - 1
    if HAS_ROWS:
        token = tl.load(tokens + entry * SLOTS + slot, mask=is_drafted, other=0)
        tl.store(out_drafts + to, tl.maximum(token, 0).to(tl.int64), mask=is_drafted)
    if HAS_PROBS:
        at = log_probs + entry * SLOTS + slot
        score = tl.load(at, mask=is_drafted, other=float("-inf"))
        before = tl.load(at - 1, mask=is_drafted & (score > float("-inf")), other=0.0)
        probs = tl.where(slot - 1 < tl.load(limits + request), tl.exp(score - before), 0.0)
        tl.store(out_probs + to, probs, mask=is_drafted)


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
        odds: [R, K+1] float32, the drafter's log-odds of a node given its parent; 0 for the root
            and in unused slots.
    """

    def __init__(self, max_requests: int, max_nodes: int, device: torch.device | str) -> None:
        super().__init__(max_requests, max_nodes, device)
        self.log_probs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.odds = torch.zeros_like(self.log_probs)

    def clear(self) -> None:
        super().clear()
        self.log_probs.fill_(-torch.inf)
        self.log_probs[:, 0] = 0
        self.odds.zero_()


class Wishes(NamedTuple):
    """What requests ask of their trees.

    Attributes:
        chains: [R] int32, 1 for a chain, the best finished beam; 0 for a tree.
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
    odds: Tensor | None = None,
    wishes: Wishes | None = None,
    rows: DraftRows | None = None,
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
        odds: [R, L, W] fp32, contiguous, the drafter's log-odds of each candidate; `out` is
            ScoredTrees then, and has the nodes' scores and odds written too. None for neither.
        wishes: of each request; None for trees without limits. A chain's scores must not rise
            from a parent to its child.
        rows: written; its `probs` need `odds` and `wishes`. None for nothing.

    Returns:
        out.

    Raises:
        ValueError: an argument's dtype, device, shape or stride does not fit; it is named.
    """
    _check_candidates(root_tokens, tokens, back_pointers, log_probs, out)
    if odds is not None:
        _check_odds(odds, log_probs, out)
    if entries is not None:
        check_tokens(entries=entries)
        require(
            entries.shape == root_tokens.shape,
            f"entries: expected {list(root_tokens.shape)}, got {list(entries.shape)}",
        )
        require_last_dim_contiguous(entries=entries)
        require_same_device(tokens, entries=entries)
    scored = out if isinstance(out, ScoredTrees) and odds is not None else None
    _check_rows(root_tokens, out, scored, wishes, rows)
    chains, limits = wishes if wishes is not None else (root_tokens, root_tokens)
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
        odds if odds is not None else log_probs,
        entries,
        chains,
        limits,
        out.tokens,
        out.parents,
        out.depths,
        out.num_nodes,
        scored.log_probs if scored is not None else log_probs,
        scored.odds if scored is not None else log_probs,
        WIDTH=width,
        NUM=num,
        BLOCK=block,
        CHUNK=chunk,
        SLOTS=slots,
        BLOCK_SLOTS=block_slots,
        HAS_ENTRIES=has_entries,
        HAS_WISHES=wishes is not None,
        HAS_ODDS=scored is not None,
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


def check_tokens(**tensors: Tensor) -> None:
    """Each tensor holds token ids, int32 or int64; the first that does not is named."""
    for name, tensor in tensors.items():
        require(
            tensor.dtype in (torch.int32, torch.int64),
            f"{name}: expected int32 or int64, got {tensor.dtype}",
        )


def check_requests(name: str, root_tokens: Tensor, tokens: Tensor, out: TreeBuffers) -> None:
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
    check_tokens(root_tokens=root_tokens, tokens=tokens, back_pointers=back_pointers)
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
    check_requests("tokens", root_tokens, tokens, out)
    require_same_device(tokens, back_pointers=back_pointers, log_probs=log_probs)


def _check_odds(odds: Tensor, log_probs: Tensor, out: TreeBuffers) -> None:
    require(
        odds.dtype == torch.float32 and odds.shape == log_probs.shape and odds.is_contiguous(),
        f"odds: must be fp32, contiguous and of shape {list(log_probs.shape)}, got "
        f"{list(odds.shape)} {odds.dtype}",
    )
    require(isinstance(out, ScoredTrees), "out: must be ScoredTrees where odds are given")
    require_same_device(log_probs, odds=odds)


def _check_rows(
    root_tokens: Tensor,
    out: TreeBuffers,
    scored: ScoredTrees | None,
    wishes: Wishes | None,
    rows: DraftRows | None,
) -> None:
    requests, nodes = root_tokens.shape[0], out.tokens.shape[1] - 1
    expected: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = []
    if wishes is not None:
        expected.append(("wishes.chains", wishes.chains, (requests,), torch.int32))
        expected.append(("wishes.limits", wishes.limits, (requests,), torch.int32))
    if rows is not None:
        expected.append(("rows.tokens", rows.tokens, (requests, nodes), torch.int64))
        if rows.probs is not None:
            require(
                scored is not None and wishes is not None,
                "rows.probs: need odds, ScoredTrees to keep the scores, and wishes",
            )
            expected.append(("rows.probs", rows.probs, (requests, nodes), torch.float32))
    for name, tensor, shape, dtype in expected:
        require(
            tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous(),
            f"{name}: must be contiguous {dtype} of shape {list(shape)}, got "
            f"{list(tensor.shape)} {tensor.dtype}",
        )
        require_same_device(root_tokens, **{name: tensor})


def naive_build_tree(
    root_tokens: Tensor, tokens: Tensor, back_pointers: Tensor, log_probs: Tensor, max_nodes: int
) -> list[dict[str, list[int]]]:
    """`build_tree` by sorting and dictionaries: per request tokens, parents, depths, ancestors.

    Lists end at the last node; an ancestor set is one Python integer. `candidates` are the kept
    ones, numbered level by level: node 1's first.
    """
    trees = []
    _, length, width = tokens.shape
    for request, root in enumerate(root_tokens.tolist()):
        candidates = [
            (-float(log_probs[request, level, beam]), level, beam)
            for level in range(length)
            for beam in range(width)
            if log_probs[request, level, beam] > -torch.inf
        ]
        kept = sorted(candidates)[:max_nodes]
        node_of = {(level, beam): i for i, (_, level, beam) in enumerate(kept, start=1)}
        parents, ancestors = [0], [1]
        for _, level, beam in kept:
            above = (level - 1, int(back_pointers[request, level, beam]))
            parents.append(node_of[above] if level else 0)
            ancestors.append(ancestors[parents[-1]] | 1 << len(ancestors))
        trees.append(
            {
                "tokens": [root, *(int(tokens[request, level, b]) for _, level, b in kept)],
                "parents": parents,
                "depths": [0, *(level + 1 for _, level, _ in kept)],
                "ancestors": ancestors,
                "candidates": [level * width + beam for _, level, beam in kept],
            }
        )
    return trees
