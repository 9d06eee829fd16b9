"""What tree attention reads and hides, from the trees: loops over a few dozen numbers.

The first layer of every decoding step waits for it; about numba see `ranking.py`.

Throughout, R requests have up to T nodes each, and a part has S slots per request, the first of
which holds the key at `first_blocks` * block size of the request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_redrafter.compiled import compiled

Array = npt.NDArray[Any]

SLOT_MULTIPLE = 16
"""Slots are multiplied in such steps, whole vectors; block sizes are multiples of it."""

UNLIMITED = 1 << 62
"""How far layers without a sliding window see."""


@compiled
def block_ranges(
    num_nodes: Array, context_lens: Array, block_size: int, window: int
) -> tuple[Array, Array]:
    """The blocks of each request that its nodes attend to.

    Args:
        num_nodes: [R] int32, roots counted.
        context_lens: [R] int64, n.
        block_size: tokens per block.
        window: keys at least this many positions back are hidden; -1 for none.

    Returns:
        first_blocks: [R] int64, places in the block table.
        num_blocks: [R] int64, how many from there.
    """
    first = np.zeros(len(num_nodes), dtype=np.int64)
    count = np.empty(len(num_nodes), dtype=np.int64)
    for r in range(len(num_nodes)):
        if window > 0:
            # The root is the first node by position: no other sees as far back.
            first[r] = max(context_lens[r] - window + 1, 0) // block_size
        end = -(-(context_lens[r] + num_nodes[r]) // block_size)
        count[r] = end - first[r]
    return first, count


@compiled
def fit_together(num_blocks: Array, most: int, most_padding: int) -> bool:
    """May all requests be one part?

    Args:
        num_blocks: [R] int64.
        most: blocks of a part of several requests.
        most_padding: blocks among these that only fill up shorter requests.
    """
    longest, used = 0, 0
    for blocks in num_blocks:
        longest = max(longest, blocks)
        used += blocks
    padded = longest * len(num_blocks)
    return padded <= most and padded - used <= most_padding


@compiled
def plan_part(
    num_nodes: Array,
    parents: Array,
    depths: Array,
    rows: Array,
    context_lens: Array,
    block_table: Array,
    first_blocks: Array,
    num_blocks: Array,
    block_size: int,
    window: int,
) -> tuple[int, int, int, Array, Array, Array]:
    """What the requests of a part share, and what each of their nodes may see.

    Args:
        num_nodes: [R] int32, roots counted.
        parents, depths: [R, T] int32 (see `TokenTree`); T may be larger than any tree.
        rows: [R, T] int64, the flat query row of each node.
        context_lens: [R] int64, n.
        block_table: [R, >= blocks in use] int32.
        first_blocks, num_blocks: [R] int64, see `block_ranges`.
        block_size: tokens per block.
        window: keys at least this many positions back are hidden; -1 for none.

    Returns:
        num_slots: S, how many of the gathered slots are multiplied per request.
        hidden_from: the first of them that may be hidden from a node.
        first_row: the row from which on all rows follow one another; -1 where they do not.
        first_slots: [R] int64, the first gathered slot of each request.
        block_ids: [R, blocks] int64; block 0 beyond a request's own.
        bias: [R, 1, 1, nodes, S - hidden_from] float32, nodes as in the largest tree: 0 where
            visible, else -inf.
    """
    nodes = num_nodes.max()
    first_slots = first_blocks * block_size
    contexts = context_lens - first_slots
    used = (contexts + num_nodes).max()
    num_slots = -(-used // SLOT_MULTIPLE) * SLOT_MULTIPLE
    reach = window if window > 0 else UNLIMITED
    hidden_from = _hidden_from(contexts, depths, nodes, reach)
    bias = np.empty((len(num_nodes), 1, 1, nodes, num_slots - hidden_from), dtype=np.float32)
    for r in range(len(num_nodes)):
        _hide(bias[r, 0, 0], contexts[r] - hidden_from, parents[r], depths[r], reach)
    first_row = _first_row(rows, nodes)
    block_ids = _block_ids(block_table, first_blocks, num_blocks)
    return num_slots, hidden_from, first_row, first_slots, block_ids, bias


@compiled
def _hidden_from(contexts: Array, depths: Array, nodes: int, reach: int) -> int:
    """See `plan_part`; `contexts` [R] int64 are the gathered slots before each tree."""
    for r in range(len(contexts)):
        # How far the deepest node is from the first slot.
        if contexts[r] + depths[r, :nodes].max() >= reach:
            return 0
    shortest: int = contexts.min()
    return shortest


@compiled
def _hide(bias: Array, start: int, parents: Array, depths: Array, reach: int) -> None:
    """Write one request's biases.

    Args:
        bias: [nodes, columns] float32, written.
        start: the root's column; those before it are the context's.
        parents, depths: [T] int32.
        reach: keys at least this many positions back are hidden.
    """
    nodes, columns = bias.shape
    for i in range(nodes):
        bias[i] = -np.inf
        bias[i, max(start + depths[i] - reach + 1, 0) : start] = 0.0
        node = i
        while depths[i] - depths[node] < reach:
            # Unused slots, which see themselves and the root, may be beyond the columns.
            if start + node < columns:
                bias[i, start + node] = 0.0
            # Parents stand before their children; the root is its own.
            if parents[node] >= node:
                break
            node = parents[node]


@compiled
def _first_row(rows: Array, nodes: int) -> int:
    """See `plan_part`."""
    first: int = rows[0, 0]
    for r in range(len(rows)):
        for i in range(nodes):
            if rows[r, i] != first + r * nodes + i:
                return -1
    return first


@compiled
def _block_ids(block_table: Array, first_blocks: Array, num_blocks: Array) -> Array:
    """See `plan_part`."""
    # Beyond a request's own blocks the table holds stale numbers: read block 0 there.
    block_ids = np.zeros((len(num_blocks), num_blocks.max()), dtype=np.int64)
    for r in range(len(num_blocks)):
        for block in range(num_blocks[r]):
            block_ids[r, block] = block_table[r, first_blocks[r] + block]
    return block_ids


@compiled
def gather_rows(block_ids: Array, kv_heads: int, head_size: int) -> tuple[Array, Array]:
    """Where K and V lie in a cache [blocks, KV heads, block size, 2 * head size].

    Each block's K half [head size, block size] and V half [block size, head size] lie one after
    the other (`kv_cache.key_value_views`).

    Args:
        block_ids: [R, B] int64.
        kv_heads, head_size: of the cache.

    Returns:
        key_rows: [R * KV heads * head size * B] int64, of the cache in rows of block size: K is
            transposed, so a row is one of head size, in a block's tokens.
        value_halves: [R * KV heads * B] int64, of the cache in halves of blocks.
    """
    requests, blocks = block_ids.shape
    key_rows = np.empty((requests, kv_heads, head_size, blocks), dtype=np.int64)
    value_halves = np.empty((requests, kv_heads, blocks), dtype=np.int64)
    for r in range(requests):
        for head in range(kv_heads):
            for block in range(blocks):
                half = (block_ids[r, block] * kv_heads + head) * 2
                value_halves[r, head, block] = half + 1
                for row in range(head_size):
                    key_rows[r, head, row, block] = half * head_size + row
    return key_rows.ravel(), value_halves.ravel()
