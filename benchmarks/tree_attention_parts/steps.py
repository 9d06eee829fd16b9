"""What surrounds attention in a step, as measured: the walk, the compaction, the tree build.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tree_attention_parts.cases import Case
from vllm_redrafter.triton_kernels.accept_path import accept_path
from vllm_redrafter.triton_kernels.build_tree import TreeBuffers, build_tree
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv


@dataclass(frozen=True)
class Walk:
    """A step in which every request accepts a longest path, moving as many rows as it can.

    Attributes:
        tokens, parents, depths, ancestors, num_nodes: see `TokenTree`.
        sampled: [rows] what the target sampled at each node.
        row_start: [R].
        output_tokens, num_sampled, path, last_row: what `accept_path` writes.
        caches: K and V of all layers.
        table: their addresses.
        slot_mapping: [rows].
        moved_bytes: what compaction reads and writes.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    num_nodes: Tensor
    sampled: Tensor
    row_start: Tensor
    output_tokens: Tensor
    num_sampled: Tensor
    path: Tensor
    last_row: Tensor
    caches: Sequence[Tensor]
    table: CacheTable
    slot_mapping: Tensor
    moved_bytes: int

    def accept_and_compact(self) -> None:
        accept_path(
            self.tokens,
            self.parents,
            self.depths,
            self.ancestors,
            self.num_nodes,
            self.sampled,
            self.row_start,
            self.output_tokens,
            self.num_sampled,
            self.path,
            self.last_row,
        )
        compact_kv(self.table, self.path, self.num_sampled, self.row_start, self.slot_mapping)


def make_walk(case: Case, layers: int, device: torch.device) -> Walk:
    """Of the case's trees and caches; blocks scattered, as for attention."""
    tree, heads, size = case.tree, case.heads, case.block_size
    starts = tree.num_nodes.cumsum(0) - tree.num_nodes
    rows = int(tree.num_nodes.sum())
    sampled = torch.zeros(rows, dtype=torch.int64)
    moved = 0
    for tree_index, (start, paths) in enumerate(zip(starts.tolist(), case.paths, strict=True)):
        # The longest; among these the one that ends in the last node.
        path = max(paths, key=lambda path: (len(path), path[-1]))
        for here, child in pairwise(path):
            sampled[start + here] = tree.tokens[tree_index, child]
        moved += sum(node != depth for depth, node in enumerate(path))

    blocks = case.batch * case.blocks_per_request
    generator = torch.Generator().manual_seed(case.seed)
    block_table = torch.randperm(blocks, generator=generator).view(case.batch, -1)
    request, node = tree.is_node.nonzero(as_tuple=True)
    position = case.context + node
    slots = block_table[request, position // size] * size + position % size
    on_device = torch.Generator(device).manual_seed(case.seed)
    caches = [
        torch.empty(blocks, size, heads.kv, heads.dim, dtype=case.dtype, device=device).normal_(
            generator=on_device
        )
        for _ in range(2 * layers)
    ]

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, -2, dtype=torch.int32, device=device)

    return Walk(
        tokens=tree.tokens.to(device),
        parents=tree.parents.to(device),
        depths=tree.depths.to(device),
        ancestors=tree.ancestors.to(device),
        num_nodes=tree.num_nodes.to(device),
        sampled=sampled.to(device),
        row_start=starts.int().to(device),
        output_tokens=empty(*tree.tokens.shape),
        num_sampled=empty(case.batch),
        path=empty(*tree.tokens.shape),
        last_row=empty(case.batch),
        caches=caches,
        table=CacheTable.of(caches),
        slot_mapping=slots.to(device),
        moved_bytes=2 * moved * heads.kv * heads.dim * case.dtype.itemsize * 2 * layers,
    )


@dataclass(frozen=True)
class Build:
    """The candidates of a beam search, and room for their trees."""

    root_tokens: Tensor
    tokens: Tensor
    back_pointers: Tensor
    log_probs: Tensor
    out: TreeBuffers

    def build(self) -> None:
        build_tree(self.root_tokens, self.tokens, self.back_pointers, self.log_probs, self.out)


def make_build(case: Case, device: torch.device) -> Build:
    """The case's search; of all it explored, as many nodes as the case's trees have room for."""
    explored = case.explored
    return Build(
        torch.arange(case.batch, device=device),
        explored.tokens.to(device),
        explored.back_pointers.to(device),
        explored.log_probs.to(device),
        TreeBuffers(case.batch, case.shape.nodes - 1, device),
    )
