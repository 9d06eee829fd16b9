"""K and V of the blocks that trees attend to, gathered into matrices of float32, piece by piece.

What is gathered is multiplied at once. If it were all of a long context, or of many requests, it
would go through the memory twice more than vLLM's kernel reads it; a piece stays in the caches of
the cores that made it, and V takes the memory of K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vllm_redrafter.engine.cpu.kv_cache import AMX_LANES
from vllm_redrafter.engine.cpu.tree_plan import Array, gather_rows

Key = TypeVar("Key", bound=tuple[object, ...])
Made = TypeVar("Made")

PIECE_BYTES = 1 << 21
"""The most of K, or of V, in float32, that is gathered at once, for each thread."""

SECOND_OF_PAIR = -(1 << 16)
"""The upper 16 of 32 bits."""

KEPT_SIZES = 256
"""Of how many sizes a workspace remembers the matrices."""


class LayerShape(NamedTuple):
    """What layers must have in common to share a plan.

    Attributes:
        kv_heads: K and V heads.
        group: query heads per KV head.
        head_size: of all heads.
        dtype: of the cache.
        amx: the cache is laid out for AMX, which is bfloat16.
    """

    kv_heads: int
    group: int
    head_size: int
    dtype: torch.dtype
    amx: bool = False


class Workspace:
    """Memory that layers, parts and steps use one after another; grows to the largest of them."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._made: dict[tuple[object, ...], object] = {}

    def take(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The memory called `name`, at least `size` elements; what was in it may be lost."""
        memory = self._memory.get((name, dtype))
        if memory is None or len(memory) < size:
            memory = self._memory[name, dtype] = torch.empty(size, dtype=dtype)
            # They would keep the smaller memory.
            self._made.clear()
        return memory

    def matrices(self, make: Callable[[Key, Workspace], Made], sizes: Key) -> Made:
        """Made at the first request for a size: steps are often as large as one before."""
        made = self._made.get((make, sizes))
        if made is None:
            if len(self._made) == KEPT_SIZES:
                self._made.clear()
            made = self._made[make, sizes] = make(sizes, self)
        return made  # type: ignore[return-value]


class PieceSizes(NamedTuple):
    """Whatever the matrices of a piece depend on.

    Attributes:
        shape: of the layers.
        requests: R.
        blocks: gathered per request.
        block_size: tokens per block.
        slots: of them, how many are multiplied.
    """

    shape: LayerShape
    requests: int
    blocks: int
    block_size: int
    slots: int


class GatheredMatrices:
    """K, and after it V, of some blocks of each request.

    Attributes:
        keys: [R * KV heads, head size, slots] float32: bf16 and fp16 are widened, as vLLM's
            kernel does.
        values: [R * KV heads, slots, head size] float32, the same memory.
        gathered_keys: [R * KV heads * head size * blocks, block size], of the cache's dtype; as
            `gathered_values` where it is laid out for AMX.
        gathered_values: [R * KV heads * blocks, block size * head size], of the cache's dtype.
    """

    def __init__(self, sizes: PieceSizes, memory: Workspace) -> None:
        (heads, _, size, dtype, amx), requests, blocks, block_size, slots = sizes
        batch, padded, block = requests * heads, blocks * block_size, block_size * size
        total = batch * padded * size
        gathered = floats = memory.take("gathered", total, dtype)
        self._widened: tuple[Tensor, Tensor] | None = None
        self._unpacked: tuple[_Pairs, _Pairs] | None = None
        if dtype != torch.float32:
            floats = memory.take("wide", total)
            self._widened = gathered[:total], floats[:total]
        if amx:
            self._unpacked = _unpacking(gathered, floats, (batch, blocks, block_size, size))
        row = block if amx else block_size
        self.gathered_keys = gathered.as_strided((total // row, row), (row, 1))
        self.gathered_values = gathered.as_strided((total // block, block), (block, 1))
        matrix = padded * size
        self.keys = floats.as_strided((batch, size, slots), (matrix, padded, 1))
        self.values = floats.as_strided((batch, slots, size), (matrix, size, 1))

    def widen(self, values: bool) -> None:
        """Make float32 of what was gathered, K or V, where it is something else."""
        if self._unpacked is not None:
            pairs, first, second = self._unpacked[values]
            torch.bitwise_left_shift(pairs, 16, out=first)
            torch.bitwise_and(pairs, SECOND_OF_PAIR, out=second)
        elif self._widened is not None:
            narrow, wide = self._widened
            wide.copy_(narrow)


class _Pairs(NamedTuple):
    """Pairs of AMX's layout, in 32 bits, and where both of a pair go."""

    pairs: Tensor
    first: Tensor
    second: Tensor


def _unpacking(
    gathered: Tensor, floats: Tensor, shape: tuple[int, int, int, int]
) -> tuple[_Pairs, _Pairs]:
    """Of K and of V in AMX's layout.

    A bfloat16 is the upper half of a float32, so of a pair in 32 bits, the first one the lower
    bits, either is one operation on integers.

    Args:
        gathered: bfloat16, K or V of all blocks; see `kv_cache.key_value_views`.
        floats: float32, K as [batch, D, blocks * B], or V as [batch, blocks * B, D].
        shape: batch, blocks, B (block size), D (head size).
    """
    batch, blocks, block_size, size = shape
    total = batch * blocks * block_size * size
    packed, wide = gathered[:total].view(torch.int32), floats[:total].view(torch.int32)
    lanes, groups = AMX_LANES, block_size // AMX_LANES
    keys = packed.view(batch, blocks, groups, size // 2, lanes)
    values = packed.view(batch, blocks, size // lanes, block_size // 2, lanes)
    to_keys = wide.view(batch, size // 2, 2, blocks, groups, lanes)
    to_values = wide.view(batch, blocks, block_size // 2, 2, size // lanes, lanes)
    return (
        _Pairs(keys.permute(0, 3, 1, 2, 4), to_keys[:, :, 0], to_keys[:, :, 1]),
        _Pairs(values.transpose(2, 3), to_values[:, :, :, 0], to_values[:, :, :, 1]),
    )


class Piece:
    """Some blocks of each request of a part, gathered at once.

    Attributes:
        slots: of the part's slots, those in these blocks.
        matrices: what K and V are gathered into.
    """

    def __init__(
        self, block_ids: Array, block_size: int, slots: slice, shape: LayerShape, memory: Workspace
    ) -> None:
        """Plan it.

        Args:
            block_ids: [R, blocks] int64.
            block_size: tokens per block.
            slots: see above.
            shape: of the layers.
            memory: for the matrices.
        """
        self.slots = slots
        requests, blocks = block_ids.shape
        sizes = PieceSizes(shape, requests, blocks, block_size, slots.stop - slots.start)
        self.matrices = memory.matrices(GatheredMatrices, sizes)
        key_rows, value_halves = gather_rows(block_ids, shape.kv_heads, shape.head_size)
        self._value_halves = torch.from_numpy(value_halves)
        # The cache, as it is gathered from.
        self._rows, self._halves = (-1, block_size), (-1, block_size * shape.head_size)
        self._key_rows = torch.from_numpy(key_rows)
        if shape.amx:
            self._rows, self._key_rows = self._halves, self._value_halves - 1

    def keys(self, kv_cache: Tensor) -> Tensor:
        """[R * KV heads, head size, slots] float32, of [blocks, KV heads, block size, 2 * head
        size]; overwritten by what is gathered next."""
        made = self.matrices
        torch.index_select(kv_cache.view(self._rows), 0, self._key_rows, out=made.gathered_keys)
        made.widen(values=False)
        return made.keys

    def values(self, kv_cache: Tensor) -> Tensor:
        """[R * KV heads, slots, head size] float32, else as `keys`."""
        made, halves = self.matrices, kv_cache.view(self._halves)
        torch.index_select(halves, 0, self._value_halves, out=made.gathered_values)
        made.widen(values=True)
        return made.values


def pieces(
    block_ids: Array, block_size: int, num_slots: int, shape: LayerShape, memory: Workspace
) -> Iterator[Piece]:
    """All blocks of a part, no more at once than stay in the caches.

    Args:
        block_ids: [R, blocks] int64.
        block_size: tokens per block.
        num_slots: of a request's, how many are multiplied.
        shape: of the layers.
        memory: for the matrices.
    """
    requests, blocks = block_ids.shape
    bytes_of_block = 4 * requests * shape.kv_heads * block_size * shape.head_size
    at_once = max(1, PIECE_BYTES * torch.get_num_threads() // bytes_of_block)
    for first in range(0, blocks, at_once):
        end = min(first + at_once, blocks)
        slots = slice(first * block_size, min(end * block_size, num_slots))
        yield Piece(block_ids[:, first:end], block_size, slots, shape, memory)
