"""The trees of a step, in parts that one set of matrix products serves. Planned once per step.

K and V of the blocks in use are gathered into one matrix per request and KV head, so that all
nodes and all query heads of a group are rows of one product. Requests whose contexts differ in
length share a part as long as little is padded; what a part gathers is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]

PART_BYTES = 1 << 24
"""The most K and V, in float32, that a part of several requests gathers per layer."""

PADDING_BYTES = 1 << 18
"""The most padding among that: gathering and multiplying more costs what a part of its own does."""

SLOT_MULTIPLE = 16
"""Slots are multiplied in such steps, whole vectors; block sizes are multiples of it."""


@dataclass(frozen=True)
class LayerShape:
    """What layers must have in common to share a plan.

    Attributes:
        kv_heads: K and V heads.
        group: query heads per KV head.
        head_size: of all heads.
        dtype: of the cache.
    """

    kv_heads: int
    group: int
    head_size: int
    dtype: torch.dtype


class Workspace:
    """Memory that layers, parts and steps use one after another; grows to the largest of them."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous tensor of the memory called `name`; whatever was in it is lost."""
        size = prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < size:
            memory = self._memory[name, dtype] = torch.empty(size, dtype=dtype)
        return memory[:size].view(shape)


@dataclass
class TreePart:
    """Some requests' trees, and the blocks that they attend to.

    Attributes:
        num_nodes: [R], the root counted.
        depths: [R, T].
        ancestors: [R, T, T] bool: entry (i, j) says that j is i or an ancestor of i.
        rows: [R, T] int64, the flat query row of each node; unused slots repeat their root's.
        context_lens: [R] n.
        first_slots: [R], where the gathered slots begin: a multiple of the block size, above 0
            where a sliding window hides what is before it.
        block_ids: [R, blocks], of the gathered blocks; block 0 beyond a request's own.
        block_size: tokens per block.
        sliding_window: keys at least this many positions back are hidden; -1 for none.
    """

    num_nodes: Indices
    depths: Indices
    ancestors: NDArray[np.bool_]
    rows: Indices
    context_lens: Indices
    first_slots: Indices
    block_ids: Indices
    block_size: int
    sliding_window: int

    @cached_property
    def num_slots(self) -> int:
        """S, how many of the gathered slots are multiplied per request."""
        used = int((self.context_lens - self.first_slots + self.num_nodes).max())
        return -(-used // SLOT_MULTIPLE) * SLOT_MULTIPLE

    @cached_property
    def slice(self) -> slice | None:
        """The flat rows, where they follow one another: trees of one size, the usual case."""
        rows = self.rows.ravel()
        first, end = int(rows[0]), int(rows[0]) + rows.size
        return slice(first, end) if np.array_equal(rows, np.arange(first, end)) else None

    @cached_property
    def flat_rows(self) -> Tensor:
        """[R * T] int64."""
        return torch.from_numpy(self.rows.ravel())

    @cached_property
    def nodes(self) -> tuple[Tensor, Tensor]:
        """([N], [N]): which of the R * T slots are nodes, and their flat rows."""
        is_node = np.arange(self.rows.shape[1]) < self.num_nodes[:, None]
        nodes = torch.from_numpy(is_node.ravel().nonzero()[0])
        return nodes, self.flat_rows[nodes]

    def distances(self, start: int = 0) -> Indices:
        """[R, T, S - start]: each slot's key position minus each node's position."""
        nodes = self._node_at(start)
        last = self.rows.shape[1] - 1
        depth = np.take_along_axis(self.depths, nodes.clip(0, last), axis=1)
        keys = np.where(nodes < 0, nodes, depth)  # both relative to n
        return keys[:, None] - self.depths[:, :, None]

    def _node_at(self, start: int) -> Indices:
        """[R, S - start]: the node in each slot; negative in the context."""
        slots = np.arange(start, self.num_slots)
        return slots + (self.first_slots - self.context_lens)[:, None]

    @cached_property
    def hidden_from(self) -> int:
        """The first gathered slot that may be hidden from a node."""
        context = self.context_lens - self.first_slots
        farthest = int((context + self.depths.max(axis=1)).max())
        if 0 < self.sliding_window <= farthest:
            return 0
        return int(context.min())

    @cached_property
    def bias(self) -> Tensor:
        """[R, 1, 1, T, S - hidden_from] float32: 0 where visible, else -inf."""
        requests, nodes = self.rows.shape
        # By node of the tree, and before them the context, after them what is in no tree.
        table = np.full((requests, nodes, nodes + 2), -np.inf, dtype=np.float32)
        table[:, :, 0] = 0
        table[:, :, 1:-1][self.ancestors] = 0
        column = np.minimum(np.maximum(self._node_at(self.hidden_from), -1), nodes) + 1
        # Advanced indices apart from one another: the slots' dimension comes before the nodes'.
        bias = table[np.arange(requests)[:, None], :, column].transpose(0, 2, 1)
        if self.sliding_window > 0:
            bias[-self.distances(self.hidden_from) >= self.sliding_window] = -np.inf
        return torch.from_numpy(bias)[:, None, None]

    @cached_property
    def float_distances(self) -> Tensor:
        """[R, 1, 1, T, S] float32, what ALiBi multiplies."""
        return torch.from_numpy(self.distances().astype(np.float32))[:, None, None]


def split_requests(num_blocks: Indices, block_bytes: int) -> list[Indices]:
    """Which requests are gathered together.

    Args:
        num_blocks: [R], the blocks in use.
        block_bytes: of K and V of a block, in float32.

    Returns:
        Indices of requests, each part's ascending. One part where the limits allow it.
    """
    padded = int(num_blocks.max()) * len(num_blocks)
    padding = (padded - int(num_blocks.sum())) * block_bytes
    if padded * block_bytes <= PART_BYTES and padding <= PADDING_BYTES:
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
        query: [R * KV heads, group * T, head size]
        keys: [R * KV heads, head size, S]
        values: [R * KV heads, S, head size]
        scores: [R * KV heads, group * T, S]
        grouped_scores: the same memory, [R, KV heads, group, T, S].
        maskable_scores: of these, the slots that may be hidden.
        weights: as `scores`.
        attended: as `query`.

        All float32: bf16 and fp16 are widened, as vLLM's kernel does.
    """

    def __init__(self, part: TreePart, shape: LayerShape, memory: Workspace) -> None:
        self.part, self.shape = part, shape
        requests, nodes = part.rows.shape
        heads, size, slots = shape.kv_heads, shape.head_size, part.num_slots
        rows, batch = shape.group * nodes, requests * shape.kv_heads
        self.query = memory.take("query", batch, rows, size)
        self.scores = memory.take("scores", batch, rows, slots)
        self.weights = memory.take("weights", batch, rows, slots)
        self.attended = memory.take("attended", batch, rows, size)
        self.grouped_scores = self.scores.view(requests, heads, shape.group, nodes, slots)
        self.maskable_scores = self.grouped_scores[..., part.hidden_from :]
        self._split = (requests, nodes, heads, shape.group, size)
        grouped = (requests, heads, shape.group, nodes, size)
        self._query_by_node = self.query.view(grouped).permute(0, 3, 1, 2, 4)
        self._attended_by_node = self.attended.view(grouped).permute(0, 3, 1, 2, 4)
        self._plan_gather(memory)
        gathered = self._wide if self._wide is not None else self._gathered
        self.keys = gathered[0].view(batch, size, -1)[:, :, :slots]
        self.values = gathered[1].view(batch, -1, size)[:, :slots]

    def _plan_gather(self, memory: Workspace) -> None:
        """Where K and V lie in the cache (`kv_cache.key_value_views`), and where they go."""
        part, shape = self.part, self.shape
        # [R, KV heads, blocks]: each block's K half and V half lie one after the other.
        heads = np.arange(shape.kv_heads)[:, None]
        halves = (part.block_ids[:, None] * shape.kv_heads + heads) * 2
        # K is transposed: a row of the cache is one of head size, in a block's tokens.
        dimension = np.arange(shape.head_size)[:, None]
        key_rows = halves[:, :, None] * shape.head_size + dimension
        self._key_rows = torch.from_numpy(key_rows.ravel())
        self._value_halves = torch.from_numpy((halves + 1).ravel())
        half = shape.head_size * part.block_size
        size = (2, halves.size * half)
        self._gathered = memory.take("gathered", *size, dtype=shape.dtype)
        self._key_target = self._gathered[0].view(-1, part.block_size)
        self._value_target = self._gathered[1].view(-1, half)
        self._wide = None if shape.dtype == torch.float32 else memory.take("wide", *size)

    def read(self, query: Tensor, kv_cache: Tensor) -> None:
        """Gather the nodes' queries, and K and V of the blocks in use.

        Args:
            query: [tokens, query heads, head size], of the whole batch.
            kv_cache: [blocks, KV heads, block size, 2 * head size].
        """
        rows, target = self.part.slice, self._key_target
        nodes = query[rows] if rows is not None else query.index_select(0, self.part.flat_rows)
        self._query_by_node.copy_(nodes.view(self._split))
        torch.index_select(kv_cache.view(-1, target.shape[1]), 0, self._key_rows, out=target)
        target = self._value_target
        torch.index_select(kv_cache.view(-1, target.shape[1]), 0, self._value_halves, out=target)
        if self._wide is not None:
            self._wide.copy_(self._gathered)

    def write(self, output: Tensor) -> None:
        """Put `attended` into the nodes' rows of `output`, [tokens, query heads, head size]."""
        if self.part.slice is not None:
            output[self.part.slice].view(self._split).copy_(self._attended_by_node)
        else:
            nodes, rows = self.part.nodes
            attended = self._attended_by_node.reshape(-1, *output.shape[1:])
            output.index_copy_(0, rows, attended.index_select(0, nodes).to(output.dtype))
