# SPDX-License-Identifier: Apache-2.0
"""The kernels of tree attention: one part of the keys at a time, then the parts merged.

What they compute is said in tree_attention.py, which launches them; their tiles are chosen in
tree_attention_tiles.py, and what `parts`, `even_parts`, `min_keys` and `max_keys` are is said in
tree_attention_plan.py. R is the number of requests; rows are the queries of all of them.
"""

import triton
import triton.language as tl


@triton.jit
def _is_ancestor(
    words,  # [BLOCK_ROWS] pointers, each to a row's ancestor set: [words] int32
    first,  # node of the tile's first key; negative where the key is context
    num_nodes,
    is_row,  # [BLOCK_ROWS] bool
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
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
    for i in tl.static_range((BLOCK_KEYS + 31) // 32):  # Triton 3.6: tl.cdiv is no constexpr
        at += 1
        low = high.to(tl.uint32)
        high = tl.load(words + at, mask=is_row & (at >= 0) & (at * 32 < num_nodes), other=0)
        # Two shifts to the left, as one by 32 is undefined.
        word = (low >> shift) | ((high.to(tl.uint32) << (31 - shift)) << 1)
        bits = tl.where((key // 32 == i)[None, :], word.to(tl.int32)[:, None], bits)
    return (((bits >> (key % 32)[None, :]) & 1) == 1) | (first + key < 0)[None, :]


@triton.jit
def _first_key(context_len, sliding_window, BLOCK_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Where a request's keys begin, at a tile's edge: before it, the window hides them from all
    rows, the root's included. They are not read: vLLM may have freed their blocks."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context_len - sliding_window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    return first


@triton.jit
def _keys_per_part(num_keys, parts, even_parts, min_keys, max_keys, BLOCK_KEYS: tl.constexpr):
    """Whole tiles; so many that `parts` parts hold all keys."""
    wanted = tl.minimum(tl.cdiv(num_keys, even_parts), max_keys)
    keys = tl.maximum(tl.maximum(wanted, min_keys), tl.cdiv(num_keys, parts))
    return tl.cdiv(keys, BLOCK_KEYS) * BLOCK_KEYS


# One kernel for all ways to split the keys: each more would be compiled while requests wait.
@triton.jit(
    do_not_specialize=[
        "parts",
        "even_parts",
        "min_keys",
        "max_keys",
        "stride_lse_row",
        "stride_lse_head",
    ]
)
def _attend_part(
    query,  # [rows, query heads, HEAD_DIM] fp16, bf16 or fp32
    key_cache,  # [blocks, BLOCK_SIZE, KV heads, HEAD_DIM] like query, or fp8 e4m3
    value_cache,  # [blocks, BLOCK_SIZE, KV heads, HEAD_DIM] likewise
    block_table,  # [R, blocks per request] int32
    context_lens,  # [R] int32
    query_start_loc,  # [R+1] int32
    ancestors,  # [R, nodes, words] int32 bit sets
    depths,  # [R, nodes] int32; read where HAS_WINDOW
    sinks,  # [query heads] floats; read where HAS_SINKS
    out,  # [rows, query heads, parts, HEAD_DIM] fp32; without SPLIT one part, in query's dtype
    lse,  # [rows, query heads, parts] fp32; written where SPLIT
    scale,
    value_scale,
    soft_cap,
    sliding_window,
    parts,
    even_parts,
    min_keys,
    max_keys,
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
    SPLIT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    part_start = _first_key(context_len, sliding_window, BLOCK_KEYS, HAS_WINDOW)
    part_end = context_len + num_nodes
    if SPLIT:
        keys_per_part = _keys_per_part(
            part_end - part_start, parts, even_parts, min_keys, max_keys, BLOCK_KEYS
        )
        part_start += part * keys_per_part
        if part_start >= part_end:
            return
        part_end = tl.minimum(part_start + keys_per_part, part_end)

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

    row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)
    for start in range(part_start, part_end, BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        is_key = position < part_end
        if HAS_WINDOW:
            is_key = is_key & (position > context_len - sliding_window)
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
        # Of fp32 alone: TF32 would keep 10 bits of the mantissa, and AMD's compiler has none.
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
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
                depths + request * stride_depths + key_node, mask=is_key & (key_node >= 0), other=0
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
        acc += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        row_max = new_max

    # The rows again, by way of a number that is loaded again: else the compiler keeps what it
    # computed for the queries' addresses, in registers that the loop needs.
    start_again = tl.load(query_start_loc + request, volatile=True)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS) + (start_again - first_row)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = node < num_nodes
    if HAS_SINKS and not SPLIT:
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
    if SPLIT:
        row_lse = tl.where(empty, float("-inf"), row_max + tl.log(tl.where(empty, 1.0, row_sum)))
        lse_at = (first_row + node).to(tl.int64) * stride_lse_row + head * stride_lse_head + part
        tl.store(lse + lse_at, row_lse, mask=is_row)


# One kernel for any number of requests, as in stage_trees.py.
@triton.jit(
    do_not_specialize=[
        "parts",
        "even_parts",
        "min_keys",
        "max_keys",
        "stride_part_lse_row",
        "stride_part_lse_head",
        "num_requests",
        "halvings",
    ]
)
def _merge_parts(
    part_out,  # [rows, query heads, parts, HEAD_DIM] fp32
    part_lse,  # [rows, query heads, parts] fp32
    context_lens,  # [R] int32
    query_start_loc,  # [R+1] int32
    sinks,  # [query heads] floats; read where HAS_SINKS
    out,  # [rows, query heads, HEAD_DIM] fp16, bf16 or fp32
    sliding_window,
    parts,
    even_parts,
    min_keys,
    max_keys,
    stride_part_row,
    stride_part_head,
    stride_part,
    stride_part_lse_row,
    stride_part_lse_head,
    stride_out_row,
    stride_out_head,
    num_requests,
    halvings,  # at least log2 of num_requests, rounded up
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One row and query head: the parts that hold keys, weighted by their sums."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    if row < tl.load(query_start_loc) or row >= tl.load(query_start_loc + num_requests):
        return
    # The last request that starts at the row or before it. A program per request and node would
    # mostly find none: a graph for 100 rows has up to 100 requests, of up to K + 1 nodes.
    request, after = 0, num_requests
    for _ in range(halvings):
        middle = (request + after) // 2
        starts_before = tl.load(query_start_loc + middle) <= row
        request = tl.where(starts_before, middle, request)
        after = tl.where(starts_before, after, middle)
    num_nodes = tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request)
    context_len = tl.load(context_lens + request)
    first_key = _first_key(context_len, sliding_window, BLOCK_KEYS, HAS_WINDOW)
    num_keys = context_len + num_nodes - first_key
    keys_per_part = _keys_per_part(num_keys, parts, even_parts, min_keys, max_keys, BLOCK_KEYS)
    row = row.to(tl.int64)

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
