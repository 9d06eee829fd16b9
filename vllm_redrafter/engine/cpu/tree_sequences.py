# SPDX-License-Identifier: Apache-2.0
"""Attention of token trees in vLLM's own kernel, which knows no trees: a sequence for each node.

A tree's K+1 rows lie in the linear slots n .. n+K of their request, in node order, where n is the
context length. Node i sees every slot of the context, and among the tree's slots those of its
ancestors and its own; its position is n + depth(i), which is what RoPE, sliding windows and ALiBi
must see instead of the slot.

So node i is the last token of a sequence of n + depth(i) + 1: the context, its ancestors, itself.
Nodes that follow the root in a line share one sequence, with its last rows for a query. K and V are
copied, layer by layer: the context once for all of a request's nodes but for its last few tokens,
and these once for every leaf, followed by the rows of the leaf's ancestors, at whose positions
sequences of the inner nodes end. The next layer copies into the same memory, which so stays in the
processor's caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.engine.cpu.cache_layout import UNIT, CacheLayout, as_integers
from vllm_redrafter.engine.cpu.tree_plan import plan_sequences
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.utils.compiled import Array, compiled

PART_BYTES = 1 << 24
"""K and V that are copied at once for several requests; a single one may have more."""

COMPILED_THREADS = 8
"""Up to as many threads, torch's copies are slower than one thread of our loop."""


@dataclass(frozen=True)
class PathCopies:
    """What the sequences of a part read; see `plan_sequences`.

    Attributes:
        units: [C, 2] int64, block and place of each unit that is copied.
        sources, targets: [M, 2] int64, the rows that are moved then, and where to.
    """

    units: Array
    sources: Array
    targets: Array


def tree_parts(
    tree: TokenTree,
    root_rows: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int,
    bytes_of_token: int,
) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], PathCopies]]:
    """Lay a step's trees out, once for all layers of a cache group; see `plan_sequences`.

    Args:
        bytes_of_token: of K and V in a layer.

    Yields:
        For requests whose rows follow one another: query_start_loc [S + 1], seq_lens [S] and
        block_table [S, columns], int32, of S sequences in blocks of `UNIT` copied tokens; and what
        is copied for them.
    """
    ends, bounds, lengths, table, *copied = plan_sequences(
        np.ascontiguousarray(tree.num_nodes.numpy(), dtype=np.int32),
        np.ascontiguousarray(tree.parents.numpy(), dtype=np.int32),
        np.ascontiguousarray(tree.depths.numpy(), dtype=np.int32),
        np.ascontiguousarray(root_rows.numpy(), dtype=np.int64),
        np.ascontiguousarray(context_lens.numpy(), dtype=np.int64),
        np.ascontiguousarray(block_table.numpy(), dtype=np.int32),
        block_size,
        UNIT,
        window,
        PART_BYTES // (UNIT * bytes_of_token),
    )
    begin = [0, 0, 0]
    for part, end in enumerate(ends.tolist()):
        sequences, copies, moves = map(slice, begin, end)
        bounds_of_part = bounds[sequences.start + part : sequences.stop + part + 1]
        of_part = bounds_of_part, lengths[sequences], table[sequences]
        query_start_loc, seq_lens, block_table_of_part = map(torch.from_numpy, of_part)
        yield (
            (query_start_loc, seq_lens, block_table_of_part),
            PathCopies(copied[0][copies], copied[1][moves], copied[2][moves]),
        )
        begin = end


class CopiedUnits:
    """Memory for copies, which layers (of one shape and dtype), parts and steps share."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._memory = torch.empty(0)
        # Views of the memory, and of caches by address: making them takes longer than copying.
        self._target: _KeyValueWords | None = None
        self._sources: dict[int, _KeyValueWords] = {}

    def write(self, copies: PathCopies, kv_cache: Tensor) -> Tensor:
        """Copy from [blocks, KV heads, block size, 2 * head size], contiguous, to
        [C, KV heads, UNIT, 2 * head size], laid out alike; overwritten by the next call."""
        layout = self._layout
        source = self._sources.get(kv_cache.data_ptr())
        if source is None:
            source = _KeyValueWords.of(kv_cache, layout.places, layout.rows)
            self._sources[kv_cache.data_ptr()] = source
        units = len(copies.units)
        if self._target is None or len(self._memory) < units:
            # With room, as contexts grow from step to step.
            _, heads, _, both = kv_cache.shape
            self._memory = kv_cache.new_empty(1 << units.bit_length(), heads, UNIT, both)
            self._target = _KeyValueWords.of(self._memory, layout.places_in_unit, layout.rows)
        if torch.get_num_threads() > COMPILED_THREADS:
            _write_reference(copies, source, self._target)
        else:
            _write_units(copies.units, copies.sources, copies.targets, *source, *self._target)
        return self._memory[:units]


class _KeyValueWords(NamedTuple):
    """Memory of K and V [blocks, KV heads, B, 2 * head size], as it is copied.

    Attributes:
        keys, values: [blocks, KV heads, 2 (K or V), rows, B / UNIT, words] int64, twice the same
            memory: of K, and of V, a unit is so many words in so many rows.
        numbers: [blocks, KV heads, B * 2 * head size], integers as wide as its numbers.
        places: [B, 2 * head size] int64: where a token's K and V are among a block's numbers.
    """

    keys: Array
    values: Array
    numbers: Array
    places: Array

    @classmethod
    def of(cls, kv: Tensor, places: Array, rows: tuple[int, int]) -> Self:
        blocks, heads, block_size, _ = kv.shape
        words, units = kv.view(torch.int64), block_size // UNIT
        keys, values = (words.view(blocks, heads, 2, count, units, -1).numpy() for count in rows)
        return cls(keys, values, as_integers(kv).numpy(), places)


def _write_reference(copies: PathCopies, source: _KeyValueWords, target: _KeyValueWords) -> None:
    blocks, places = torch.from_numpy(copies.units).unbind(1)
    for half, views in enumerate(("keys", "values")):
        words, to = (torch.from_numpy(getattr(of, views)) for of in (source, target))
        # [C, KV heads, rows, words]
        to[: len(blocks), :, half, :, 0] = words[:, :, half][blocks, :, :, places]
    numbers, to = torch.from_numpy(source.numbers), torch.from_numpy(target.numbers)
    from_block, from_place = torch.from_numpy(copies.sources).unbind(1)
    to_unit, to_place = torch.from_numpy(copies.targets).unbind(1)
    heads = torch.arange(numbers.shape[1]).view(-1, 1)
    read = torch.from_numpy(source.places)[from_place].unsqueeze(1)
    written = torch.from_numpy(target.places)[to_place].unsqueeze(1)
    # [M, KV heads, 2 * head size]
    moved = numbers[from_block.view(-1, 1, 1), heads, read]
    to[to_unit.view(-1, 1, 1), heads, written] = moved


@compiled
def _write_units(
    units: Array,
    sources: Array,
    targets: Array,
    keys: Array,
    values: Array,
    numbers: Array,
    places: Array,
    to_keys: Array,
    to_values: Array,
    to_numbers: Array,
    to_places: Array,
) -> None:
    """Copy units of K and V, then rows of single tokens: `PathCopies`, twice `_KeyValueWords`."""
    for at in range(len(units)):
        block, place = units[at]
        for head in range(keys.shape[1]):
            _copy_half(keys[block, head, 0], place, to_keys[at, head, 0])
            _copy_half(values[block, head, 1], place, to_values[at, head, 1])
    for move in range(len(sources)):
        read, written = places[sources[move, 1]], to_places[targets[move, 1]]
        for head in range(numbers.shape[1]):
            row, to = numbers[sources[move, 0], head], to_numbers[targets[move, 0], head]
            for number in range(len(read)):
                to[written[number]] = row[read[number]]


@compiled
def _copy_half(half: Array, place: int, to: Array) -> None:
    """[rows, units, words] to [rows, 1, words]; loops of constant length are vectorised."""
    words = half.shape[2]
    for row in range(len(half)):
        if words == 8:
            for word in range(8):
                to[row, 0, word] = half[row, place, word]
        elif words == 16:
            for word in range(16):
                to[row, 0, word] = half[row, place, word]
        else:
            for word in range(words):
                to[row, 0, word] = half[row, place, word]


def warm_up(dtype: torch.dtype) -> None:
    """Let numba compile now, and not in the first step, for a cache of this dtype."""
    root = torch.zeros(1, 1, dtype=torch.int32)
    tree = TokenTree(root, root, root, num_nodes=torch.ones(1, dtype=torch.int32))
    rows = torch.zeros(1, dtype=torch.int64)
    list(tree_parts(tree, rows, rows, root, UNIT, -1, bytes_of_token=1))
    one = np.zeros((1, 2), dtype=np.int64)
    unit = torch.zeros(1, 1, UNIT, 2 * UNIT, dtype=dtype)
    places = np.arange(unit.numel()).reshape(UNIT, -1)
    CopiedUnits(CacheLayout(places, places, (1, 1))).write(PathCopies(one, one, one), unit)
