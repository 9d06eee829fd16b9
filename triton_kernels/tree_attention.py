"""Tree attention over a paged KV cache, for decoding steps that verify token trees.

R requests each bring up to 128 query nodes. Node i of a request with context length n attends to
the context, positions [0, n), and among the tree's own rows, which lie in the cache at positions
n .. n+T-1 in node order, to its ancestors and itself (a bit set). For a row with query q:

    s_j = scale * q . k_j, capped to c * tanh(s_j / c) where there is a cap c
    out = sum_j e^{s_j} v_j / (sum_j e^{s_j} + e^{sink}),    lse = log(sum_j e^{s_j} + e^{sink})

Verification is bound by memory like plain decoding, so K and V are read once per request and KV
head: the group's query heads and all nodes are the rows of one product. (Rows beyond a tile's are
in further tiles, which read them again, mostly from L2.) The keys are split into parts, as in
flash-decoding, so that few requests fill the GPU; a second kernel merges the parts:

    m = max_p lse_p,    out = sum_p e^{lse_p - m} out_p / sum_p e^{lse_p - m}

A plain decode is a tree of one node and may be in the same launch. Chunks of a prompt may not:
with more than 128 queries they are bound by arithmetic, and vLLM's own kernels are made for them.

Shapes are fixed by the arguments' sizes, lengths are read on the device: launches can be captured
in CUDA graphs, and nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import WORD_BITS
from vllm_redrafter.triton_kernels.checks import require
from vllm_redrafter.triton_kernels.tree_attention_arguments import (
    check_options,
    check_sizes,
    check_tensors,
)
from vllm_redrafter.triton_kernels.tree_attention_tiles import choose_parts, choose_tile, padded


@triton.jit
def _is_ancestor(
    words, first, num_nodes, is_row, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr
):
    """Which of the nodes first .. first+BLOCK_KEYS-1 each row may see; negative ones are context.

    Per row, words are loaded and shifted so that the tile's first node is bit 0: a load for each 32
    keys and one more, where a load per row and key would take registers for as many addresses.
    """
    key = tl.arange(0, BLOCK_KEYS)
    # Rounds down, where // would round towards zero.
    at = (first >> 5) + tl.zeros([BLOCK_ROWS], dtype=tl.int32)
    shift = first & 31
    bits = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], dtype=tl.int32)
    high = tl.load(words + at, mask=is_row & (at >= 0) & (at * 32 < num_nodes), other=0)
    for i in tl.static_range(tl.cdiv(BLOCK_KEYS, 32)):
        at += 1
        low = high.to(tl.uint32)
        high = tl.load(words + at, mask=is_row & (at >= 0) & (at * 32 < num_nodes), other=0)
        # Two shifts to the left, as one by 32 is undefined.
        word = (low >> shift) | ((high.to(tl.uint32) << (31 - shift)) << 1)
        bits = tl.where((key // 32 == i)[None, :], word.to(tl.int32)[:, None], bits)
    return (((bits >> (key % 32)[None, :]) & 1) == 1) | (first + key < 0)[None, :]


@triton.jit
def _attend_part(
    query,
    key_cache,
    value_cache,
    block_table,
    context_lens,
    query_start_loc,
    ancestors,
    depths,
    sinks,
    out,
    lse,
    scale,
    value_scale,
    soft_cap,
    sliding_window,
    stride_query_row,
    stride_query_head,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_table,
    stride_ancestors_request,
    stride_ancestors_node,
    stride_depths,
    stride_out_row,
    stride_out_head,
    stride_out_part,
    stride_lse_row,
    stride_lse_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of the keys, for one request, one KV head and one tile of rows."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1) // ROW_TILES
    tile = tl.program_id(1) % ROW_TILES
    part = tl.program_id(2)

    first_row = tl.load(query_start_loc + request)
    num_nodes = tl.load(query_start_loc + request + 1) - first_row
    context_len = tl.load(context_lens + request)
    if tile * BLOCK_ROWS >= num_nodes * GROUP:
        return
    num_keys = context_len + num_nodes
    keys_per_part = tl.cdiv(tl.cdiv(num_keys, BLOCK_KEYS), PARTS) * BLOCK_KEYS
    part_start = part * keys_per_part
    part_end = tl.minimum(part_start + keys_per_part, num_keys)
    if part_start >= num_keys:
        return

    # Row m of the tile is node m // GROUP under query head m % GROUP of this KV head's group.
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = node < num_nodes
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < HEAD_DIM
    q_at = (first_row + node).to(tl.int64) * stride_query_row + head * stride_query_head
    q = tl.load(
        query + q_at[:, None] + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0
    )
    if HAS_WINDOW:
        query_depth = tl.load(depths + request * stride_depths + node, mask=is_row, other=0)
        query_position = context_len + query_depth
        # Keys before the root's window are hidden from all rows. They are not read: vLLM may have
        # freed their blocks.
        first_key = context_len - sliding_window + 1
        part_start = tl.maximum(part_start, first_key // BLOCK_KEYS * BLOCK_KEYS)

    row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)
    for start in range(part_start, part_end, BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        is_key = position < part_end
        if HAS_WINDOW:
            is_key = is_key & (position >= first_key)
        block = tl.load(
            block_table + request * stride_table + position // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        slot = position % BLOCK_SIZE
        k_at = block * stride_key_block + slot * stride_key_slot + kv_head * stride_key_head
        k = tl.load(
            key_cache + k_at[None, :] + dim[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (e^{2x} + 1): exact at both ends, where e^{2x} is 0 or infinite.
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
        # Masked here and not all at once: a mask of rows and keys, kept until then, is registers.
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        if start + BLOCK_KEYS > context_len:
            # The tile reaches into the tree: key position - n is a node; is it an ancestor?
            visible = _is_ancestor(
                ancestors + request * stride_ancestors_request + node * stride_ancestors_node,
                start - context_len,
                num_nodes,
                is_row,
                BLOCK_ROWS,
                BLOCK_KEYS,
            )
            scores = tl.where(visible, scores, float("-inf"))
        if HAS_WINDOW:
            key_node = position - context_len
            key_depth = tl.load(
                depths + request * stride_depths + key_node,
                mask=is_key & (key_node >= 0),
                other=0,
            )
            key_position = tl.where(key_node >= 0, context_len + key_depth, position)
            visible = query_position[:, None] - key_position[None, :] < sliding_window
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key yet keeps -inf; e^{-inf - -inf} would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        correction = tl.exp(row_max - shift)
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        v_at = block * stride_value_block + slot * stride_value_slot + kv_head * stride_value_head
        v = tl.load(
            value_cache + v_at[:, None] + dim[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        acc = acc * correction[:, None]
        acc += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        row_max = new_max

    # The rows again, by way of a number that is loaded again: else the compiler keeps what it
    # computed for the queries' addresses, in registers that the loop needs.
    start_again = tl.load(query_start_loc + request, volatile=True)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS) + (start_again - first_row)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = node < num_nodes
    if PARTS == 1 and HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        new_max = tl.maximum(row_max, sink)
        correction = tl.exp(row_max - new_max)
        row_sum = row_sum * correction + tl.exp(sink - new_max)
        acc = acc * correction[:, None]
        row_max = new_max
    empty = row_sum == 0.0
    result = acc * (value_scale / tl.where(empty, 1.0, row_sum))[:, None]
    out_at = (first_row + node).to(tl.int64) * stride_out_row + head * stride_out_head
    tl.store(
        out + (out_at + part * stride_out_part)[:, None] + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )
    if HAS_LSE:
        row_lse = tl.where(empty, float("-inf"), row_max + tl.log(tl.where(empty, 1.0, row_sum)))
        lse_at = (first_row + node).to(tl.int64) * stride_lse_row + head * stride_lse_head + part
        tl.store(lse + lse_at, row_lse, mask=is_row)


@triton.jit
def _merge_parts(
    part_out,
    part_lse,
    context_lens,
    query_start_loc,
    sinks,
    out,
    lse,
    stride_part_row,
    stride_part_head,
    stride_part,
    stride_part_lse_row,
    stride_part_lse_head,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One node and query head: the parts that hold keys, weighted by their sums."""
    request = tl.program_id(0)
    node = tl.program_id(1)
    head = tl.program_id(2)
    first_row = tl.load(query_start_loc + request)
    num_nodes = tl.load(query_start_loc + request + 1) - first_row
    if node >= num_nodes:
        return
    num_keys = tl.load(context_lens + request) + num_nodes
    keys_per_part = tl.cdiv(tl.cdiv(num_keys, BLOCK_KEYS), PARTS) * BLOCK_KEYS
    row = (first_row + node).to(tl.int64)

    part = tl.arange(0, BLOCK_PARTS)
    written = part * keys_per_part < num_keys
    weights_at = row * stride_part_lse_row + head * stride_part_lse_head + part
    part_sums = tl.load(part_lse + weights_at, mask=written, other=float("-inf"))
    largest = tl.max(part_sums, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        largest = tl.maximum(largest, sink)
    weights = tl.exp(part_sums - largest)
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - largest)
    dim = tl.arange(0, BLOCK_DIM)
    parts_at = row * stride_part_row + head * stride_part_head
    parts = tl.load(
        part_out + parts_at + part[:, None] * stride_part + dim[None, :],
        mask=written[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], axis=0) / total
    out_at = row * stride_out_row + head * stride_out_head + dim
    tl.store(out + out_at, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    if HAS_LSE:
        tl.store(lse + row * stride_lse_row + head, largest + tl.log(total))


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    ancestors: Tensor,
    max_nodes: int,
    max_context_len: int,
    out: Tensor | None = None,
    *,
    scale: float | None = None,
    depths: Tensor | None = None,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    lse: Tensor | None = None,
    num_parts: int | None = None,
) -> Tensor:
    """Attention of all nodes of all requests.

    Args:
        query: [rows, query heads, head_dim] fp16, bf16 or fp32; request r's nodes are rows
            query_start_loc[r] .. query_start_loc[r+1] - 1, in node order.
        key_cache: [blocks, block_size, KV heads, head_dim] in query's dtype or fp8 e4m3; any
            strides but that of the last dimension, which is 1 (vLLM's NHD and HND layouts are
            views of this shape).
        value_cache: likewise.
        block_table: [R, blocks per request] int32.
        context_lens: [R] int32, n: keys in the cache before the tree.
        query_start_loc: [R+1] int32.
        ancestors: [R, >= max_nodes, words] int32 bit sets, self included (TokenTree.ancestors).
        max_nodes: at least the most nodes of any request, at most 128; sizes the launch.
        max_context_len: at least the largest context length; sizes the launch.
        out: like query, or None for a new tensor. Rows of no request are not written.
        scale: multiplies q.k; None for 1 / sqrt(head_dim).
        depths: [R, >= max_nodes] int32; needed with a sliding window.
        sliding_window: keys this many positions back or more are hidden; 0 for none. A tree's
            positions are n + depth.
        soft_cap: 0 for none.
        sinks: [query heads] floats or None.
        key_scale, value_scale: what an fp8 cache's numbers are multiplied with.
        lse: [rows, query heads] fp32 that receives the log-sum-exp, or None.
        num_parts: how many parts the keys are split into; None chooses by the number of programs.

    Returns:
        out.

    Raises:
        ValueError: an argument's dtype, device, shape or stride does not fit; it is named.
    """
    check_tensors(
        query, key_cache, value_cache, block_table, context_lens, query_start_loc, ancestors
    )
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    requests, heads, head_dim = context_lens.shape[0], query.shape[1], query.shape[2]
    check_sizes(block_table, ancestors, requests, max_nodes, max_context_len, block_size)
    require(
        sliding_window == 0 or depths is not None,
        "depths is needed with a sliding window: positions in a tree are n + depth",
    )
    require(num_parts is None or num_parts >= 1, f"num_parts must be at least 1, got {num_parts}")
    out = torch.empty_like(query) if out is None else out
    check_options(query, requests, max_nodes, out, depths, sinks, lse)

    group = heads // kv_heads
    rows = max_nodes * group
    tile = choose_tile(rows, head_dim, query.dtype)
    row_tiles = padded(rows, tile.rows) // tile.rows
    block_dim = triton.next_power_of_2(head_dim)
    programs = requests * kv_heads * row_tiles
    if num_parts is None:
        num_parts = choose_parts(programs, max_context_len + max_nodes, query.device)

    split = num_parts > 1
    if split:
        target: Tensor = query.new_empty(
            (*query.shape[:2], num_parts, head_dim), dtype=torch.float32
        )
        part_lse: Tensor | None = query.new_empty(
            (*query.shape[:2], num_parts), dtype=torch.float32
        )
    else:
        target, part_lse = out.unsqueeze(2), None if lse is None else lse.unsqueeze(2)
    depth_of = depths if depths is not None else context_lens
    scale = head_dim**-0.5 if scale is None else scale
    _attend_part[(requests, kv_heads * row_tiles, num_parts)](
        query,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        query_start_loc,
        ancestors,
        depth_of,
        sinks if sinks is not None else query,
        target,
        part_lse if part_lse is not None else query,
        scale * key_scale,
        value_scale,
        soft_cap,
        sliding_window,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        ancestors.stride(0),
        ancestors.stride(1),
        depth_of.stride(0),
        target.stride(0),
        target.stride(1),
        target.stride(2),
        part_lse.stride(0) if part_lse is not None else 0,
        part_lse.stride(1) if part_lse is not None else 0,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys,
        ROW_TILES=row_tiles,
        PARTS=num_parts,
        HAS_CAP=soft_cap > 0,
        HAS_WINDOW=sliding_window > 0,
        HAS_SINKS=sinks is not None,
        HAS_LSE=part_lse is not None,
        # fp32 stays fp32: TF32 would keep 10 bits of the mantissa.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
    )
    if split:
        assert part_lse is not None
        _merge_parts[(requests, max_nodes, heads)](
            target,
            part_lse,
            context_lens,
            query_start_loc,
            sinks if sinks is not None else query,
            out,
            lse if lse is not None else query,
            target.stride(0),
            target.stride(1),
            target.stride(2),
            part_lse.stride(0),
            part_lse.stride(1),
            out.stride(0),
            out.stride(1),
            lse.stride(0) if lse is not None else 0,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim,
            BLOCK_KEYS=tile.keys,
            BLOCK_PARTS=triton.next_power_of_2(num_parts),
            PARTS=num_parts,
            HAS_SINKS=sinks is not None,
            HAS_LSE=lse is not None,
            num_warps=4,
        )
    return out


def naive_tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    ancestors: Tensor,
    *,
    scale: float | None = None,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`tree_attention` by loops, in float64; depths are counted from the bit sets.

    Returns:
        (out [rows, query heads, head_dim], lse [rows, query heads]), float64; rows of no request
        are NaN.
    """
    heads, head_dim = query.shape[1], query.shape[2]
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.full(query.shape, torch.nan, dtype=torch.float64)
    lse = torch.full(query.shape[:2], torch.nan, dtype=torch.float64)
    for request, n in enumerate(context_lens.tolist()):
        first, end = query_start_loc[request : request + 2].tolist()
        for row in range(first, end):
            seen = _set_bits(ancestors[request, row - first])
            positions = torch.tensor([*range(n), *(n + node for node in seen)])
            # The i-th of these keys is at position i: the context, then one node per depth.
            if sliding_window:
                positions = positions[max(0, len(positions) - sliding_window) :]
            block = block_table[request].cpu()[positions // block_size].long()
            slot = positions % block_size
            keys = key_cache.cpu()[block, slot].double() * key_scale
            values = value_cache.cpu()[block, slot].double() * value_scale
            keys = keys.repeat_interleave(heads // kv_heads, dim=1)
            values = values.repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("hd,phd->hp", query[row].cpu().double(), keys) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.cpu().double().unsqueeze(1)], dim=1)
            weights = scores.softmax(dim=1)[:, : len(positions)]
            out[row] = torch.einsum("hp,phd->hd", weights, values)
            lse[row] = scores.logsumexp(dim=1)
    return out, lse


def _set_bits(words: Tensor) -> list[int]:
    return [
        word * WORD_BITS + bit
        for word, value in enumerate(words.tolist())
        for bit in range(WORD_BITS)
        if value >> bit & 1
    ]
