# SPDX-License-Identifier: Apache-2.0
"""One step's verification, as its parts share it: trees staged, a path walked, rows compacted.

The model state stages the batch's trees before the forward pass, the scorer walks them and moves
the accepted KV rows, and the speculator drafts from where the walk stopped. All buffers are made
once, as CUDA graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_redrafter.triton_kernels.build_tree import TreeBuffers
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv
from vllm_redrafter.triton_kernels.observe_nodes import VerifiedTrees
from vllm_redrafter.triton_kernels.rope_positions import add_depths
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees, stage_trees


class TreeRowsInCache(NamedTuple):
    """Where a step has put the K and V of its trees.

    Attributes:
        row_start: [R] int32, the row of each request's root among the step's rows.
        slot_mappings: [KV cache groups, rows] int64, the cache slot of each row.
    """

    row_start: Tensor
    slot_mappings: Tensor

    def copy(self) -> TreeRowsInCache:
        """The same, which the next step does not write over."""
        return TreeRowsInCache(self.row_start.clone(), self.slot_mappings.clone())


class Verification:
    """The trees of a step's batch and what came of them; all buffers are in the batch's order.

    Attributes:
        staged: the trees under verification.
        path: [requests, K+1] int32, the accepted nodes, root first.
        last_rows: [requests] int64, the row, among the step's rows of hidden states, that the next
            draft starts from: the last accepted node's.
        num_verified: [requests] int32, how many nodes the step has verified, roots included; 0
            where it verified none. For the draft's CUDA graph, which learns from them.
        num_nodes_on_host: [R] int32, of the last step's verified trees, roots included; being
            copied, see `copy_num_nodes`.
    """

    def __init__(self, max_num_reqs: int, max_nodes: int, device: torch.device) -> None:
        """Allocate for so many requests of trees of K = `max_nodes` nodes and the root."""
        self.staged = StagedTrees(max_num_reqs, max_nodes, device)
        self.path = torch.zeros(max_num_reqs, max_nodes + 1, dtype=torch.int32, device=device)
        self.last_rows = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.num_verified = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.num_nodes_on_host = torch.zeros(0, dtype=torch.int32)
        # Chains are not compacted: there are no caches then.
        self._slot_mappings = torch.empty(0, 0, dtype=torch.int64, device=device)
        self._caches: list[list[CacheTable]] = []

    def use_caches(self, slot_mappings: Tensor, groups: Iterable[Sequence[Tensor]]) -> None:
        """Say where KV rows are, when vLLM has allocated the cache.

        Args:
            slot_mappings: [KV cache groups, rows] int64, vLLM's buffer of the step's slots.
            groups: per KV cache group, its layers' caches. They are not kept: vLLM frees those
                that it profiles with before it says here where the real ones are.
        """
        self._slot_mappings = slot_mappings
        self._caches = [cache_tables(caches) for caches in groups]

    def stage(self, trees: TreeBuffers, input_batch: InputBatch, requests: int) -> None:
        """Bring the trees of the batch's first requests into its order, and turn the positions of
        their rows into n + depth.

        Args:
            trees: by request slot, the trees drafted last.
            input_batch: the step's batch; its positions are changed in place.
            requests: how many.
        """
        stage_trees(
            trees,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            input_batch.seq_lens,
            input_batch.positions,
            self.staged,
            requests,
        )

    def place(self, positions: Tensor, input_batch: InputBatch) -> None:
        """Give the staged trees' rows M-RoPE positions.

        Args:
            positions: [dimensions, rows] int64, vLLM's; changed in place.
            input_batch: the step's batch, staged before.
        """
        add_depths(self.staged, input_batch.cu_num_logits, positions)

    def note_verified(self, requests: int, padded: int) -> None:
        """Fill `num_verified`: the batch's first requests' trees were walked, those from there to
        `padded` were not."""
        self.num_verified[:requests].copy_(self.staged.num_nodes[:requests])
        self.num_verified[requests:padded].zero_()

    def copy_num_nodes(self, requests: int) -> None:
        """Begin to bring the step's numbers of nodes to the host, where they are counted."""
        num_nodes = self.staged.num_nodes[:requests]
        self.num_nodes_on_host = num_nodes.to("cpu", non_blocking=True, copy=True)

    def verified_trees(self) -> VerifiedTrees:
        """The trees and the paths, for kernels that learn from them."""
        staged = self.staged
        return VerifiedTrees(
            staged.tokens, staged.parents, staged.depths, self.num_verified, self.path
        )

    def accepted(self, requests: int) -> Tensor:
        """[requests, K+1] bool: the nodes on the paths of the batch's first requests."""
        accepted = torch.zeros_like(self.staged.tokens[:requests], dtype=torch.bool)
        # Behind the path's end: the root once more.
        return accepted.scatter_(1, self.path[:requests].clamp(min=0).long(), True)

    @property
    def rows(self) -> TreeRowsInCache:
        """Of the step; the next one writes over it."""
        return TreeRowsInCache(self.staged.row_start, self._slot_mappings)

    def compact(self, num_sampled: Tensor) -> None:
        """Move the rows of the accepted paths into the linear slots.

        Must be done before the step ends: the next may find these blocks by their hash.

        Args:
            num_sampled: [R] int32, how many nodes of each path count.
        """
        self.compact_rows(self.rows, self.path, num_sampled)

    def compact_rows(self, rows: TreeRowsInCache, path: Tensor, num_sampled: Tensor) -> None:
        """The same for an earlier step's rows.

        Args:
            rows: of at least R requests.
            path: [>= R, K+1] int32, the nodes that were accepted of their trees.
            num_sampled: [R] int32.
        """
        for slot_mapping, tables in zip(rows.slot_mappings, self._caches, strict=True):
            for table in tables:
                compact_kv(table, path, num_sampled, rows.row_start, slot_mapping)


def cache_tables(caches: Iterable[Tensor]) -> list[CacheTable]:
    """The caches of a group's layers as few tables, one launch each.

    Args:
        caches: per layer [blocks, KV heads, block size, K and V of a head]; layers that share a
            cache give it once each.
    """

    def layout(cache: Tensor) -> tuple[Any, ...]:
        return (*cache.shape, *cache.stride(), str(cache.dtype))

    unique = sorted({c.data_ptr(): c for c in caches}.values(), key=layout)
    # A row of K and V together is contiguous, so both move at once.
    return [
        CacheTable.of([cache.transpose(1, 2) for cache in same])
        for _, same in groupby(unique, key=layout)
    ]
