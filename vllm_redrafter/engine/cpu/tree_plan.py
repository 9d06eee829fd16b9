# SPDX-License-Identifier: Apache-2.0
"""Which sequences give tree attention, and what is copied for them.

Throughout, R requests have up to T nodes each, and K and V are copied in units of `unit` tokens.
"""

import numpy as np

from vllm_redrafter.utils.compiled import Array, compiled

SEQUENCES, COPIES, MOVES = 0, 1, 2
"""What is counted, by its place among the counts."""


@compiled
def plan_sequences(
    num_nodes: Array,
    parents: Array,
    depths: Array,
    root_rows: Array,
    context_lens: Array,
    block_table: Array,
    block_size: int,
    unit: int,
    window: int,
    most_copies: int,
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    """Lay every tree out as sequences that a causal kernel can read; see `tree_sequences.py`.

    Args:
        num_nodes, parents, depths: see `TokenTree`, int32.
        root_rows: [R] int64, ascending; a request's other nodes follow its root.
        context_lens: [R] int64, n.
        block_table: [R, >= blocks in use] int32.
        block_size: a multiple of `unit`.
        window: keys at least this many positions back are hidden; -1 for none.
        most_copies: units that a part of several requests may copy.

    Returns:
        ends: [parts, 3] int64, where each part's sequences, copies and moves end.
        bounds: [S + parts] int32, of each part the first row of each sequence, and behind them
            where the last one ends.
        lengths: [S] int32, of each sequence.
        table: [S, columns] int32, the copied units that each sequence reads, by their place in
            its part; anything where they are hidden.
        copies: [C, 2] int64, the block of each unit that is copied, and its place there.
        sources: [M, 2] int64, the block of each row that is moved behind that, and its place.
        targets: [M, 2] int64, the copied unit that it is moved into, and its place there.
    """
    most_sequences, most_copied, most_moved, columns = _sizes(num_nodes, depths, context_lens, unit)
    ends = np.empty((len(num_nodes), 3), dtype=np.int64)
    bounds = np.empty(most_sequences + len(num_nodes), dtype=np.int32)
    lengths = np.empty(most_sequences, dtype=np.int32)
    table = np.zeros((most_sequences, columns), dtype=np.int32)
    copies = np.empty((most_copied, 2), dtype=np.int64)
    sources = np.empty((most_moved, 2), dtype=np.int64)
    targets = np.empty((most_moved, 2), dtype=np.int64)
    paths = np.empty(parents.shape[1], dtype=np.int64)
    counts = np.zeros(3, dtype=np.int64)
    parts = first_copy = end_row = 0
    for r in range(len(num_nodes)):
        n, nodes = context_lens[r], num_nodes[r]
        shared = n // unit
        hidden = max(n - window + 1, 0) // unit if window > 0 else 0
        most = counts[COPIES] - first_copy + shared - hidden + 2 * nodes
        if r > 0 and (root_rows[r] != end_row or most > most_copies):
            bounds[counts[SEQUENCES] + parts] = end_row
            ends[parts] = counts
            parts, first_copy = parts + 1, counts[COPIES]
        end_row = root_rows[r] + nodes
        context = counts[COPIES] - first_copy
        _copy(counts, copies, block_table[r], hidden, shared, block_size // unit)
        tree = (parents[r, :nodes], depths[r, :nodes])
        to = (copies, sources, targets)
        _copy_paths(counts, first_copy, n, tree, block_table[r], block_size, unit, paths, to)
        line = _line(parents[r], nodes)
        for node in range(nodes):
            if 0 < node < line:
                continue
            # The root's sequence has the whole line for its last rows.
            last, at = max(node, line - 1), counts[SEQUENCES]
            bounds[at + parts] = root_rows[r] + node
            lengths[at] = n + depths[r, last] + 1
            for column in range(hidden, shared):
                table[at, column] = context + column - hidden
            for column in range(shared, (n + depths[r, last]) // unit + 1):
                table[at, column] = paths[last] + column - shared
            counts[SEQUENCES] += 1
    bounds[counts[SEQUENCES] + parts] = end_row
    ends[parts] = counts
    sequences, copied, moved = counts
    return (
        ends[: parts + 1],
        bounds[: sequences + parts + 1],
        lengths[:sequences],
        table[:sequences],
        copies[:copied],
        sources[:moved],
        targets[:moved],
    )


@compiled
def _sizes(
    num_nodes: Array, depths: Array, context_lens: Array, unit: int
) -> tuple[int, int, int, int]:
    """Upper bounds of sequences, copies and moves; and the columns of the table."""
    sequences = copies = moves = columns = 0
    for r in range(len(num_nodes)):
        sequences += num_nodes[r]
        copies += context_lens[r] // unit
        for node in range(num_nodes[r]):
            # As if every node were a leaf.
            end = (context_lens[r] + depths[r, node]) // unit + 1
            copies += end - context_lens[r] // unit
            moves += depths[r, node]
            columns = max(columns, end)
    return sequences, copies, moves, columns


@compiled
def _copy(
    counts: Array, copies: Array, blocks: Array, first: int, end: int, units_of_block: int
) -> None:
    """Copy a request's units from `first` on, those before `end`."""
    for at in range(first, end):
        copied = counts[COPIES]
        copies[copied, 0], copies[copied, 1] = blocks[at // units_of_block], at % units_of_block
        counts[COPIES] += 1


@compiled
def _copy_paths(
    counts: Array,
    first_copy: int,
    n: int,
    tree: tuple[Array, Array],
    blocks: Array,
    block_size: int,
    unit: int,
    paths: Array,
    to: tuple[Array, Array, Array],
) -> None:
    """Copy the last tokens of a request's context for every leaf, and move its ancestors there.

    Args:
        first_copy: of the part.
        n: tokens of context.
        tree: parents and depths, [nodes] int32.
        paths: [T] int64, written: the copied unit of the part in which the context of each node
            ends; those of its path follow it.
        to: `copies`, `sources` and `targets` of `plan_sequences`.
    """
    parents, depths = tree
    copies, sources, targets = to
    shared, tail = n // unit, n % unit
    paths[:] = -1
    # Children stand behind their parents: the first of a path is a leaf.
    for leaf in range(len(parents) - 1, -1, -1):
        if paths[leaf] >= 0:
            continue
        path = counts[COPIES] - first_copy
        _copy(counts, copies, blocks, shared, shared + 1, block_size // unit)
        # What lies in these is moved there.
        for _ in range((tail + depths[leaf]) // unit):
            _copy(counts, copies, blocks, shared, shared + 1, block_size // unit)
        node = leaf
        while node > 0:
            if paths[node] < 0:
                paths[node] = path
            slot, place = n + node, tail + depths[node]
            # In line with the root, and in its unit, it was copied to its place.
            if depths[node] != node or place >= unit:
                moved = counts[MOVES]
                sources[moved, 0], sources[moved, 1] = blocks[slot // block_size], slot % block_size
                targets[moved, 0], targets[moved, 1] = path + place // unit, place % unit
                counts[MOVES] += 1
            node = parents[node]
        if paths[0] < 0:
            paths[0] = path


@compiled
def _line(parents: Array, nodes: int) -> int:
    """How many nodes, from the root on, are a chain in the order of their rows."""
    line = 1
    while line < nodes and parents[line] == line - 1:
        line += 1
    return line
