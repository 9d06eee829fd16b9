"""Which tiles and aims are tried: what a factor of two, in one number, makes of another.

Imports Triton, but no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from tree_attention_parts.cases import Heads, TreeShape
from vllm_redrafter.triton_kernels.tree_attention_plan import PartAims
from vllm_redrafter.triton_kernels.tree_attention_tiles import MAX_REGISTERS, TILES, Tile, TileKey
from vllm_redrafter.triton_kernels.tree_attention_tuning import SIZES

ELEMENT_BYTES = 2
"""Of fp16 and bf16, which decoding is done in; an fp8 cache has the tiles of its queries."""

HEAD_DIMS = (128, 64, 256, 512)
"""From the most usual on: a sweep may be cut short."""

GROUP = 4
KV_HEADS = 8
WARPS = (2, 4, 8)
STAGES = (3, 5, 7)
"""Triton divides them between the loads of K and V: 3 copy nothing ahead, 5 one step, 7 two."""

MOST_ACCUMULATORS = 128
"""Per thread. With more, the registers that are left would spill."""

REGISTERS = (128, 168, MAX_REGISTERS, None)


@dataclass(frozen=True)
class TunedShape:
    """What a tile is looked for, and the trees that it is tried on.

    Attributes:
        heads: as many per KV head as make `rows` of the tree's nodes.
        rows: of the tile that TILES has.
    """

    heads: Heads
    rows: int

    @property
    def nodes(self) -> TreeShape:
        return TreeShape.parse(str(self.rows * self.heads.kv // self.heads.query))

    @property
    def key(self) -> TileKey:
        return ELEMENT_BYTES, self.heads.dim, self.rows

    def __str__(self) -> str:
        return f"head size {self.heads.dim}, {self.rows} rows"


def tuned_shapes() -> list[TunedShape]:
    """All that a table can have an entry for, in fp16 and bf16."""
    return [
        TunedShape(Heads(f"head size {dim}", GROUP * KV_HEADS, KV_HEADS, dim), tile.rows)
        for dim in HEAD_DIMS
        for tile in TILES[ELEMENT_BYTES, dim]
    ]


def tile_neighbours(tile: Tile, head_dim: int) -> Iterator[Tile]:
    """One step up or down in one of its numbers; any other limit of registers."""
    for made in _one_number_apart(tile):
        if made.rows * head_dim <= MOST_ACCUMULATORS * 32 * made.num_warps:
            yield made


def _one_number_apart(tile: Tile) -> Iterator[Tile]:
    for name, values in (
        ("rows", SIZES),
        ("keys", SIZES),
        ("num_warps", WARPS),
        ("num_stages", STAGES),
    ):
        for value in _beside(getattr(tile, name), values):
            yield replace(tile, **{name: value})
    for registers in REGISTERS:
        if registers != tile.max_registers:
            yield replace(tile, max_registers=registers)


def aims_neighbours(aims: PartAims) -> Iterator[PartAims]:
    """Half or twice one of its numbers."""
    for field in fields(aims):
        value = getattr(aims, field.name)
        for other in (value // 2, value * 2):
            if other:
                yield replace(aims, **{field.name: other})


def _beside(value: int, values: Sequence[int]) -> Iterator[int]:
    for low, high in pairwise(values):
        if high == value:
            yield low
        if low == value:
            yield high
