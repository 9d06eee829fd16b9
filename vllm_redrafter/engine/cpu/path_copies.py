# SPDX-License-Identifier: Apache-2.0
"""K and V of a layer, copied for the sequences of a step's trees (`tree_sequences.py`).

The next layer copies into the same memory, which so stays in the processor's caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_redrafter.engine.cpu.cache_layout import UNIT, CacheLayout, as_integers
from vllm_redrafter.engine.cpu.tree_plan import Array
from vllm_redrafter.utils.compiled import compiled

COMPILED_THREADS = 8
"""Up to as many threads, torch's copies are slower than one thread of our loop."""


@dataclass(frozen=True)
class PathCopies:
    """What the sequences of a part read; see `tree_plan.plan_sequences`.

    Attributes:
        units: [C, 2] int64, block and place of each unit that is copied.
        sources, targets: [M, 2] int64, the rows that are moved then, and where to.
    """

    units: Array
    sources: Array
    targets: Array


class CopiedUnits:
    """Memory for copies, which layers (of one shape and dtype), parts and steps share."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._memory = torch.empty(0)
        # Views of the memory, and of caches by address: making them takes longer than copying.
        self._target: _KeyValueWords | None = None
        self._sources: dict[int, _KeyValueWords] = {}

    def write(self, copies: PathCopies, kv_cache: Tensor) -> Tensor:
        """Copy from [blocks, KV heads, block size, 2 * head size], contiguous.

        Returns:
            [C, KV heads, UNIT, 2 * head size], laid out alike; overwritten by the next call.
        """
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
    def of(cls, kv: Tensor, places: Array, rows: tuple[int, int]) -> _KeyValueWords:
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
    one = torch.zeros(1, 2, dtype=torch.int64).numpy()
    unit = torch.zeros(1, 1, UNIT, 2 * UNIT, dtype=dtype)
    places = torch.arange(unit.numel()).view(UNIT, -1).numpy()
    CopiedUnits(CacheLayout(places, places, (1, 1))).write(PathCopies(one, one, one), unit)
