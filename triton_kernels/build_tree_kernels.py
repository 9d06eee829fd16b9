# SPDX-License-Identifier: Apache-2.0
"""The kernels of build_tree.py: which candidates become nodes, and what their order settles."""

import triton
import triton.language as tl


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
def _above(
    at,  # int32 values, candidates; -1 for none
    back_pointers_ptr,  # [NUM], of the request
    WIDTH: tl.constexpr,
):
    """The parents of candidates; -1 above level 0, where back-pointers say nothing."""
    beam = tl.load(back_pointers_ptr + at, mask=at >= WIDTH, other=0).to(tl.int32)
    return tl.where(at >= WIDTH, (at // WIDTH - 1) * WIDTH + beam, -1)


@triton.jit
def _is_on_best_path(
    index,  # [BLOCK] int32 values
    scores,  # [BLOCK] fp32 values
    back_pointers_ptr,  # [NUM], of the request
    scores_ptr,  # [NUM] fp32, likewise
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
):
    """Which candidates the path passes through of which the most tokens are expected."""
    # Of the path that ends at each candidate; a dead one ends none.
    expected = tl.where(scores > float("-inf"), tl.exp(scores), -1.0)
    at = _above(tl.where(scores > float("-inf"), index, -1), back_pointers_ptr, WIDTH)
    for _ in range(NUM // WIDTH - 1):
        above = tl.load(scores_ptr + at, mask=at >= 0, other=float("-inf"))
        expected += tl.exp(above)
        at = _above(at, back_pointers_ptr, WIDTH)
    most = tl.max(expected, axis=0)
    end = tl.min(tl.where(expected == most, index, NUM), axis=0)
    end = tl.where(most >= 0.0, end, -1)
    is_on = index == end
    for _ in range(NUM // WIDTH - 1):
        end = _above(end, back_pointers_ptr, WIDTH)
        is_on = is_on | (index == end)
    return is_on


@triton.jit
def _select_nodes(
    root_tokens,  # [R] int64
    tokens,  # [R, L, WIDTH] int64
    back_pointers,  # [R, L, WIDTH] int64
    log_probs,  # [R, L, WIDTH] fp32
    log_odds,  # [R, L, WIDTH] fp32; read where HAS_LOG_ODDS
    match_classes,  # [R, L, WIDTH] int32; read where HAS_MATCHES
    entries,  # [R] int64
    chains,  # [entries] int32
    limits,  # [entries] int32
    out_tokens,  # [entries, SLOTS] int32, written
    out_parents,  # [entries, SLOTS] int32, written
    out_depths,  # [entries, SLOTS] int32, written
    out_num_nodes,  # [entries] int32, written
    out_log_probs,  # [entries, SLOTS] fp32, written
    out_log_odds,  # [entries, SLOTS] fp32, written where HAS_LOG_ODDS
    out_match_classes,  # [entries, SLOTS] int32, written where HAS_MATCHES
    WIDTH: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    HAS_LOG_ODDS: tl.constexpr,
    HAS_MATCHES: tl.constexpr,
):
    """One request: rank the candidates, write the best as nodes, blank the unused slots."""
    request = tl.program_id(0)
    entry = tl.load(entries + request).to(tl.int32)
    scores_ptr = log_probs + request * NUM
    index = tl.arange(0, BLOCK)
    is_candidate = index < NUM
    scores = tl.load(scores_ptr + index, mask=is_candidate, other=float("-inf"))
    level = index // WIDTH
    rank = _rank(scores, index, scores_ptr, NUM, BLOCK, CHUNK)
    wants_chain = tl.load(chains + entry) != 0
    if wants_chain:
        pointers_ptr = back_pointers + request * NUM
        is_on = _is_on_best_path(index, scores, pointers_ptr, scores_ptr, WIDTH, NUM)
        rank = tl.where(is_on, level, SLOTS)
    is_node = is_candidate & (scores > float("-inf")) & (rank < SLOTS - 1)

    beam_above = tl.load(back_pointers + request * NUM + index, mask=is_node, other=0)
    parent = (level - 1) * WIDTH + beam_above.to(tl.int32)
    has_parent = is_node & (level > 0)
    parent_scores = tl.load(scores_ptr + parent, mask=has_parent, other=float("-inf"))
    parent_rank = _rank(parent_scores, parent, scores_ptr, NUM, BLOCK, CHUNK)
    parent_rank = tl.where(wants_chain, level - 1, parent_rank)

    at = entry * SLOTS + rank + 1
    token = tl.load(tokens + request * NUM + index, mask=is_node, other=0)
    tl.store(out_tokens + at, token.to(tl.int32), mask=is_node)
    tl.store(out_parents + at, tl.where(has_parent, parent_rank + 1, 0), mask=is_node)
    tl.store(out_depths + at, level + 1, mask=is_node)
    tl.store(out_log_probs + at, scores, mask=is_node)
    if HAS_LOG_ODDS:
        own_log_odds = tl.load(log_odds + request * NUM + index, mask=is_node, other=0.0)
        tl.store(out_log_odds + at, own_log_odds, mask=is_node)
    if HAS_MATCHES:
        match = tl.load(match_classes + request * NUM + index, mask=is_node, other=0)
        tl.store(out_match_classes + at, match, mask=is_node)

    num_nodes = tl.sum(is_node.to(tl.int32), axis=0) + 1
    slot = tl.arange(0, BLOCK_SLOTS)
    unused = (slot >= num_nodes) & (slot < SLOTS)
    blank, at = unused | (slot == 0), entry * SLOTS + slot
    tl.store(out_tokens + at, -1, mask=unused)
    tl.store(out_parents + at, 0, mask=blank)
    tl.store(out_depths + at, 0, mask=blank)
    tl.store(out_tokens + entry * SLOTS, tl.load(root_tokens + request).to(tl.int32))
    tl.store(out_num_nodes + entry, tl.minimum(num_nodes, tl.load(limits + entry) + 1))
    tl.store(out_log_probs + at, tl.where(slot == 0, 0.0, float("-inf")), mask=blank)
    if HAS_LOG_ODDS:
        tl.store(out_log_odds + at, tl.zeros([BLOCK_SLOTS], tl.float32), mask=blank)
    if HAS_MATCHES:
        tl.store(out_match_classes + at, tl.zeros([BLOCK_SLOTS], tl.int32), mask=blank)


@triton.jit
def _finish_trees(
    tokens,  # [entries, SLOTS] int32
    parents,  # [entries, SLOTS] int32
    depths,  # [entries, SLOTS] int32
    log_probs,  # [entries, SLOTS] fp32
    entries,  # [R] int64
    limits,  # [entries] int32
    ancestors,  # [entries, SLOTS, WORDS] int32, written
    out_drafts,  # [R, SLOTS - 1] int64, written
    out_probs,  # [entries, SLOTS] fp32, written
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One request: each node climbs to its root and sets a bit per node on the way.

    What is asked about the nodes in their order is read off, too.
    """
    request = tl.program_id(0)
    entry = tl.load(entries + request).to(tl.int32)
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
    at = entry * SLOTS + slot
    token = tl.load(tokens + at, mask=is_drafted, other=0)
    to = out_drafts + request * (SLOTS - 1) + slot - 1
    tl.store(to, tl.maximum(token, 0).to(tl.int64), mask=is_drafted)
    score = tl.load(log_probs + at, mask=is_drafted, other=float("-inf"))
    is_node = is_drafted & (score > float("-inf"))
    before = tl.load(log_probs + at - 1, mask=is_node, other=0.0)
    probs = tl.where(slot - 1 < tl.load(limits + entry), tl.exp(score - before), 0.0)
    tl.store(out_probs + at, probs, mask=is_drafted)
