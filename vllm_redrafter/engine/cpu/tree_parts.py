"""The trees of a step, in parts that one set of matrix products serves. Planned once per step.

K and V of the blocks in use are gathered into one matrix per request and KV head, so that all
nodes and all query heads of a group are rows of one product. Requests whose contexts differ in
length share a part as long as little is padded; what a part gathers is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_redrafter.engine.cpu.kv_cache import AMX_LANES
from vllm_redrafter.engine.cpu.tree_plan import Array, fit_together, gather_rows, plan_part

Indices = NDArray[np.int64]

PART_BYTES = 1 << 24
"""The most K and V, in float32, that a part of several requests gathers per layer."""

PADDING_BYTES = 1 << 18
"""The most padding among that: gathering and multiplying more costs what a part of its own does."""

SECOND_OF_PAIR = -(1 << 16)
"""The upper 16 of 32 bits."""

KEPT_SIZES = 256
"""Of how many sizes of parts a workspace remembers the matrices."""


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


class Sizes(NamedTuple):
    """Whatever the matrices of a part depend on.

    Attributes:
        shape: of the layers.
        requests: R.
        nodes: T, of the largest tree.
        blocks: gathered per request.
        block_size: tokens per block.
        slots: S, see `TreePart`.
    """

    shape: LayerShape
    requests: int
    nodes: int
    blocks: int
    block_size: int
    slots: int


class Workspace:
    """Memory that layers, parts and steps use one after another; grows to the largest of them."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._matrices: dict[Sizes, Matrices] = {}

    def take(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The memory called `name`, at least `size` elements; what was in it may be lost."""
        memory = self._memory.get((name, dtype))
        if memory is None or len(memory) < size:
            memory = self._memory[name, dtype] = torch.empty(size, dtype=dtype)
            # They would keep the smaller memory.
            self._matrices.clear()
        return memory

    def matrices(self, sizes: Sizes) -> Matrices:
        """Made at the first request for a size: steps are often as large as one before."""
        made = self._matrices.get(sizes)
        if made is None:
            if len(self._matrices) == KEPT_SIZES:
                self._matrices.clear()
            made = self._matrices[sizes] = Matrices(sizes, self)
        return made


class Matrices:
    """What the products of a part read and write, in the memory of a workspace.

    Attributes:
        query: [R * KV heads, group * T, head size]
        keys: [R * KV heads, head size, S]
        values: [R * KV heads, S, head size]
        scores: [R * KV heads, group * T, S]
        grouped_scores: the same memory, [R, KV heads, group, T, S].
        weights: as `scores`.
        attended: as `query`.
        node_shape: R, T, KV heads, group, head size.
        query_by_node, attended_by_node: the memory of `query` and `attended`, so shaped.
        gathered_keys: [R * KV heads * head size * blocks, block size], of the cache's dtype; as
            `gathered_values` where it is laid out for AMX.
        gathered_values: [R * KV heads * blocks, block size * head size], of the cache's dtype.

        float32 where nothing is said: bf16 and fp16 are widened, as vLLM's kernel does.
    """

    def __init__(self, sizes: Sizes, memory: Workspace) -> None:
        # One call makes each, as the first layer of a step may wait for it.
        (heads, group, size, *_), requests, nodes, _, _, slots = sizes
        batch, rows = requests * heads, group * nodes
        flat = (batch, rows, size), (rows * size, size, 1)
        strides = heads * rows * size, size, rows * size, nodes * size, 1
        self.node_shape = requests, nodes, heads, group, size
        by_node = self.node_shape, strides
        query = memory.take("query", batch * rows * size)
        self.query, self.query_by_node = query.as_strided(*flat), query.as_strided(*by_node)
        attended = memory.take("attended", batch * rows * size)
        self.attended = attended.as_strided(*flat)
        self.attended_by_node = attended.as_strided(*by_node)
        by_slot = (batch, rows, slots), (rows * slots, slots, 1)
        self.scores = memory.take("scores", batch * rows * slots).as_strided(*by_slot)
        self.grouped_scores = self.scores.view(requests, heads, group, nodes, slots)
        self.weights = memory.take("weights", batch * rows * slots).as_strided(*by_slot)
        self._take_gathered(sizes, batch, memory)

    def _take_gathered(self, sizes: Sizes, batch: int, memory: Workspace) -> None:
        """K of all blocks, and V behind it; only the first S of the slots are multiplied."""
        (_, _, size, dtype, amx), _, _, blocks, block_size, slots = sizes
        padded, block = blocks * block_size, block_size * size
        matrix, half = padded * size, batch * padded * size
        gathered = floats = memory.take("gathered", 2 * half, dtype)
        # Of both K and V in one, the gathered elements and the same in float32.
        self._widened: tuple[Tensor, Tensor] | None = None
        self._unpacked: list[tuple[Tensor, Tensor, Tensor]] = []
        if dtype != torch.float32:
            floats = memory.take("wide", 2 * half)
            self._widened = gathered[: 2 * half], floats[: 2 * half]
        if amx:
            self._unpacked = _unpacking(gathered, floats, (batch, blocks, block_size, size))
        row = block if amx else block_size
        self.gathered_keys = gathered.as_strided((half // row, row), (row, 1))
        self.gathered_values = gathered.as_strided((half // block, block), (block, 1), half)
        self.keys = floats.as_strided((batch, size, slots), (matrix, padded, 1))
        self.values = floats.as_strided((batch, slots, size), (matrix, size, 1), half)

    def widen(self) -> None:
        """Make float32 of what was gathered, where it is something else."""
        if self._unpacked:
            for pairs, first, second in self._unpacked:
                torch.bitwise_left_shift(pairs, 16, out=first)
                torch.bitwise_and(pairs, SECOND_OF_PAIR, out=second)
        elif self._widened is not None:
            narrow, wide = self._widened
            wide.copy_(narrow)


def _unpacking(
    gathered: Tensor, floats: Tensor, shape: tuple[int, int, int, int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Views of K and of V in AMX's layout, as pairs, and of where both of a pair go.

    A bfloat16 is the upper half of a float32, so of a pair in 32 bits, the first one the lower
    bits, either is one operation on integers.

    Args:
        gathered: bfloat16, K of all blocks, and V behind it; see `kv_cache.key_value_views`.
        floats: float32, K as [batch, D, blocks * B], and V as [batch, blocks * B, D] behind it.
        shape: batch, blocks, B (block size), D (head size).
    """
    batch, blocks, block_size, size = shape
    half = batch * blocks * block_size * size
    packed, wide = gathered[: 2 * half].view(torch.int32), floats[: 2 * half].view(torch.int32)
    lanes, groups = AMX_LANES, block_size // AMX_LANES
    keys = packed[: half // 2].view(batch, blocks, groups, size // 2, lanes)
    values = packed[half // 2 :].view(batch, blocks, size // lanes, block_size // 2, lanes)
    to_keys = wide[:half].view(batch, size // 2, 2, blocks, groups, lanes)
    to_values = wide[half:].view(batch, blocks, block_size // 2, 2, size // lanes, lanes)
    return [
        (keys.permute(0, 3, 1, 2, 4), to_keys[:, :, 0], to_keys[:, :, 1]),
        (values.transpose(2, 3), to_values[:, :, :, 0], to_values[:, :, :, 1]),
    ]


class Trees(NamedTuple):
    """The trees and contexts of R requests, in the one layout that the planning is compiled for.

    Attributes:
        num_nodes: [R] int32, roots counted.
        parents, depths: [R, T] int32, see `TokenTree`.
        rows: [R, T] int64, the flat query row of each node; unused slots repeat their root's.
        context_lens: [R] int64, n.
        block_table: [R, >= blocks in use] int32.
    """

    num_nodes: Array
    parents: Array
    depths: Array
    rows: Array
    context_lens: Array
    block_table: Array

    def select(self, requests: Indices) -> Trees:
        """The trees of some requests."""
        return Trees(*(array[requests] for array in self))


@dataclass
class TreePart:
    """Some requests' trees, and the blocks that they attend to.

    Attributes:
        trees: their T is at least this part's, the nodes of its largest tree.
        rows: [R, T] int64, of `trees`.
        first_slots: [R] int64, where the gathered slots begin: a multiple of the block size, above
            0 where a sliding window hides what is before it.
        block_ids: [R, blocks] int64, of the gathered blocks; block 0 beyond a request's own.
        block_size: tokens per block.
        num_slots: S, how many of the gathered slots are multiplied per request.
        hidden_from: the first gathered slot that may be hidden from a node.
        slice: the flat rows, where they follow one another: trees of one size, the usual case.
        bias: [R, 1, 1, T, S - hidden_from] float32: 0 where visible, else -inf.
    """

    trees: Trees
    rows: Indices
    first_slots: Indices
    block_ids: Indices
    block_size: int
    num_slots: int
    hidden_from: int
    slice: slice | None
    bias: Tensor

    @classmethod
    def planned(
        cls, trees: Trees, first_blocks: Array, num_blocks: Array, block_size: int, window: int
    ) -> TreePart:
        """See `tree_plan.plan_part`."""
        num_slots, hidden_from, first_row, first_slots, block_ids, bias = plan_part(
            *trees, first_blocks, num_blocks, block_size, window
        )
        rows = trees.rows[:, : bias.shape[3]]
        end = first_row + rows.size
        return cls(
            trees=trees,
            rows=rows,
            first_slots=first_slots,
            block_ids=block_ids,
            block_size=block_size,
            num_slots=num_slots,
            hidden_from=hidden_from,
            slice=slice(first_row, end) if first_row >= 0 else None,
            bias=torch.from_numpy(bias),
        )

    @cached_property
    def flat_rows(self) -> Tensor:
        """[R * T] int64."""
        return torch.from_numpy(self.rows.ravel())

    @cached_property
    def nodes(self) -> tuple[Tensor, Tensor]:
        """([N], [N]): which of the R * T slots are nodes, and their flat rows."""
        is_node = np.arange(self.rows.shape[1]) < self.trees.num_nodes[:, None]
        nodes = torch.from_numpy(is_node.ravel().nonzero()[0])
        return nodes, self.flat_rows[nodes]

    def nodes_of(self, query: Tensor) -> Tensor:
        """[R * T, query heads, head size], of [tokens, ...]: the rows of the nodes."""
        if self.slice is not None:
            return query[self.slice]
        return query.index_select(0, self.flat_rows)

    def put_nodes(self, output: Tensor, attended: Tensor) -> None:
        """Write the nodes' rows of `output`.

        Args:
            output: [tokens, query heads, head size].
            attended: [R, T, KV heads, group, head size], of any strides.
        """
        if self.slice is not None:
            output[self.slice].view(attended.shape).copy_(attended)
        else:
            nodes, rows = self.nodes
            by_row = attended.reshape(-1, *output.shape[1:])
            output.index_copy_(0, rows, by_row.index_select(0, nodes).to(output.dtype))

    @cached_property
    def float_distances(self) -> Tensor:
        """[R, 1, 1, T, S] float32, each slot's key position minus each node's: for ALiBi."""
        slots = self.rows.shape[1]
        depths = self.trees.depths[:, :slots].astype(np.int64)
        # The node in each slot; negative in the context.
        nodes = np.arange(self.num_slots) + (self.first_slots - self.trees.context_lens)[:, None]
        depth = np.take_along_axis(depths, nodes.clip(0, slots - 1), axis=1)
        keys = np.where(nodes < 0, nodes, depth)  # both relative to n
        distances = keys[:, None] - depths[:, :, None]
        return torch.from_numpy(distances.astype(np.float32))[:, None, None]


def split_requests(num_blocks: Indices, block_bytes: int) -> list[Indices]:
    """Which requests are gathered together.

    Args:
        num_blocks: [R], the blocks in use.
        block_bytes: of K and V of a block, in float32.

    Returns:
        Indices of requests, each part's ascending. One part where the limits allow it.
    """
    if fit_together(num_blocks, PART_BYTES // block_bytes, PADDING_BYTES // block_bytes):
        return [np.arange(len(num_blocks))]
    order, parts = np.argsort(-num_blocks, kind="stable"), []
    while order.size:
        blocks = num_blocks[order]
        gathered = blocks[0] * np.arange(1, len(order) + 1)
        # Both grow with every request that is taken in.
        fits = gathered * block_bytes <= PART_BYTES
        fits &= (gathered - blocks.cumsum()) * block_bytes <= PADDING_BYTES
        taken = max(1, int(fits.sum()))
        parts.append(np.sort(order[:taken]))
        order = order[taken:]
    return parts


class Products:
    """A part's index tensors and memory for layers of one shape.

    Attributes:
        part: whose products these are.
        shape: of the layers.
        matrices: what is multiplied.
        maskable_scores: of `matrices.grouped_scores`, the slots that may be hidden.
    """

    def __init__(self, part: TreePart, shape: LayerShape, memory: Workspace) -> None:
        self.part, self.shape = part, shape
        requests, nodes = part.rows.shape
        blocks = part.block_ids.shape[1]
        sizes = Sizes(shape, requests, nodes, blocks, part.block_size, part.num_slots)
        self.matrices = memory.matrices(sizes)
        self.maskable_scores = self.matrices.grouped_scores[..., part.hidden_from :]
        key_rows, value_halves = gather_rows(part.block_ids, shape.kv_heads, shape.head_size)
        self._value_halves = torch.from_numpy(value_halves)
        # The cache, as it is gathered from.
        self._rows, self._halves = (-1, part.block_size), (-1, part.block_size * shape.head_size)
        self._key_rows = torch.from_numpy(key_rows)
        if shape.amx:
            self._rows, self._key_rows = self._halves, self._value_halves - 1

    def read(self, query: Tensor, kv_cache: Tensor) -> None:
        """Gather the nodes' queries, and K and V of the blocks in use.

        Args:
            query: [tokens, query heads, head size], of the whole batch.
            kv_cache: [blocks, KV heads, block size, 2 * head size].
        """
        matrices = self.matrices
        nodes = self.part.nodes_of(query)
        matrices.query_by_node.copy_(nodes.view(matrices.node_shape))
        rows, halves = kv_cache.view(self._rows), kv_cache.view(self._halves)
        torch.index_select(rows, 0, self._key_rows, out=matrices.gathered_keys)
        torch.index_select(halves, 0, self._value_halves, out=matrices.gathered_values)
        matrices.widen()

    def write(self, output: Tensor) -> None:
        """Put `attended` into the nodes' rows of `output`, [tokens, query heads, head size]."""
        self.part.put_nodes(output, self.matrices.attended_by_node)
