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

from vllm_redrafter.engine.cpu.tree_gather import LayerShape, Workspace, pieces
from vllm_redrafter.engine.cpu.tree_plan import Array, fit_together, plan_part

Indices = NDArray[np.int64]

PART_BYTES, THREAD_BYTES = 1 << 24, 1 << 22
"""The most K and V, in float32, that a part of several requests gathers per layer; and for each
thread, whose caches they stay in."""

PADDING_BYTES = 1 << 18
"""The most padding among that: gathering and multiplying more costs what a part of its own does."""


class Sizes(NamedTuple):
    """Whatever the matrices of a part depend on.

    Attributes:
        shape: of the layers.
        requests: R.
        nodes: T, of the largest tree.
        slots: S, see `TreePart`.
    """

    shape: LayerShape
    requests: int
    nodes: int
    slots: int


class Matrices:
    """What the products of a part read and write, in the memory of a workspace.

    All of them are float32.

    Attributes:
        query: [R * KV heads, group * T, head size]
        scores: [R * KV heads, group * T, S]
        grouped_scores: the same memory, [R, KV heads, group, T, S].
        weights: as `scores`.
        attended: as `query`.
        node_shape: R, T, KV heads, group, head size.
        query_by_node, attended_by_node: the memory of `query` and `attended`, so shaped.
    """

    def __init__(self, sizes: Sizes, memory: Workspace) -> None:
        # One call makes each, as the first layer of a step may wait for it.
        (heads, group, size, *_), requests, nodes, slots = sizes
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
    most = min(THREAD_BYTES * torch.get_num_threads(), PART_BYTES)
    if fit_together(num_blocks, most // block_bytes, PADDING_BYTES // block_bytes):
        return [np.arange(len(num_blocks))]
    order, parts = np.argsort(-num_blocks, kind="stable"), []
    while order.size:
        blocks = num_blocks[order]
        gathered = blocks[0] * np.arange(1, len(order) + 1)
        # Both grow with every request that is taken in.
        fits = gathered * block_bytes <= most
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
        pieces: of the part's K and V, what is gathered at once.
    """

    def __init__(self, part: TreePart, shape: LayerShape, memory: Workspace) -> None:
        self.part, self.shape = part, shape
        requests, nodes = part.rows.shape
        sizes = Sizes(shape, requests, nodes, part.num_slots)
        self.matrices = memory.matrices(Matrices, sizes)
        self.maskable_scores = self.matrices.grouped_scores[..., part.hidden_from :]
        self.pieces = list(pieces(part.block_ids, part.block_size, part.num_slots, shape, memory))

    def read(self, query: Tensor) -> None:
        """Gather the nodes' queries, of [tokens, query heads, head size], the whole batch's."""
        nodes = self.part.nodes_of(query)
        self.matrices.query_by_node.copy_(nodes.view(self.matrices.node_shape))

    def score(self, kv_cache: Tensor, scale: float) -> None:
        """Write `matrices.scores`, of K in [blocks, KV heads, block size, 2 * head size]."""
        query, scores = self.matrices.query, self.matrices.scores
        for piece in self.pieces:
            of_piece = scores if len(self.pieces) == 1 else scores[..., piece.slots]
            of_piece.baddbmm_(query, piece.keys(kv_cache), beta=0, alpha=scale)

    def attend(self, kv_cache: Tensor) -> None:
        """Write `matrices.attended`, the values of all slots by `matrices.weights`."""
        weights, attended = self.matrices.weights, self.matrices.attended
        for piece in self.pieces:
            of_piece = weights if len(self.pieces) == 1 else weights[..., piece.slots]
            beta = int(piece is not self.pieces[0])
            attended.baddbmm_(of_piece, piece.values(kv_cache), beta=beta)

    def write(self, output: Tensor) -> None:
        """Put `attended` into the nodes' rows of `output`, [tokens, query heads, head size]."""
        self.part.put_nodes(output, self.matrices.attended_by_node)
