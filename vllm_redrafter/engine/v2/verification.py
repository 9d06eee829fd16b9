# SPDX-License-Identifier: Apache-2.0
"""The trees drafted last, and a step's verification: trees staged, a path walked, rows compacted.

Its buffers, which CUDA graphs hold, are shared by model state, scorer and speculator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.v2.stats import StepTimer
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees, TreeBuffers
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv
from vllm_redrafter.triton_kernels.observe_nodes import VerifiedTrees
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees, stage_trees

if TYPE_CHECKING:
    from vllm_redrafter.engine.v2.budget import TreeBudget
    from vllm_redrafter.engine.v2.earlier_answers import EarlierAnswers


class TreeRowsInCache(NamedTuple):
    """Where a step put the K and V of its trees.

    `row_start` [R] int32: the row of each root in the step; `slot_mappings` [KV cache groups, rows]
    int64: the cache slot of each row.
    """

    row_start: Tensor
    slot_mappings: Tensor

    def copy(self) -> TreeRowsInCache:
        return TreeRowsInCache(self.row_start.clone(), self.slot_mappings.clone())


class Verification:
    """The trees of a step's batch and what came of them, in the batch's order.

    Attributes:
        staged: the trees under verification.
        path: [requests, K+1] int32, the accepted nodes, root first.
        last_rows: [requests] int64, the hidden state's row that the next draft starts from.
        num_verified: [requests] int32, nodes verified, roots included; 0: not verified.
        temperatures: [requests] float32, above 0 for requests that sample; where drafts learn.
        num_nodes_on_host: [R] int32, nodes of the last step, being copied (`copy_num_nodes`).
        starts: [2, requests + 1] int32, where each request's rows start: a tree's, and others.
    """

    def __init__(self, max_num_reqs: int, max_nodes: int, device: torch.device) -> None:
        self.staged = StagedTrees(max_num_reqs, max_nodes, device)
        self.path = torch.zeros(max_num_reqs, max_nodes + 1, dtype=torch.int32, device=device)
        self.last_rows = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.num_verified = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(max_num_reqs, device=device)
        self.num_nodes_on_host = torch.zeros(0, dtype=torch.int32)
        self.starts = torch.zeros(2, max_num_reqs + 1, dtype=torch.int32, device=device)
        # Chains are not compacted: there are no caches then.
        self._slot_mappings = torch.empty(0, 0, dtype=torch.int64, device=device)
        self._caches: list[list[CacheTable]] = []

    def use_caches(self, slot_mappings: Tensor, groups: Iterable[Sequence[Tensor]]) -> None:
        """Say where KV rows are, when vLLM has allocated the cache.

        `groups`: the layers' caches by KV cache group; not kept: vLLM frees those it profiles.
        """
        self._slot_mappings = slot_mappings
        self._caches = [_cache_tables(caches) for caches in groups]

    def stage(self, trees: TreeBuffers, input_batch: InputBatch, requests: int) -> None:
        """Copy the first requests' trees into batch order; row positions become n + depth."""
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

    def split_rows(self, query_start_loc: Tensor, tree_rows: int) -> None:
        """Fill `starts`; the step's first `tree_rows` are trees'."""
        of_trees, of_others = self.starts[:, : query_start_loc.shape[0]]
        torch.clamp(query_start_loc, max=tree_rows, out=of_trees)
        torch.clamp(query_start_loc, min=tree_rows, out=of_others)

    def copy_num_nodes(self, requests: int) -> None:
        """Begin to copy the step's numbers of nodes to the host."""
        num_nodes = self.staged.num_nodes[:requests]
        self.num_nodes_on_host = num_nodes.to("cpu", non_blocking=True, copy=True)

    def verified_trees(self) -> VerifiedTrees:
        staged, walked = self.staged, (self.num_verified, self.path, self.temperatures)
        return VerifiedTrees(staged.tokens, staged.parents, staged.depths, *walked)

    @property
    def rows(self) -> TreeRowsInCache:
        return TreeRowsInCache(self.staged.row_start, self._slot_mappings)

    def compact(
        self, num_sampled: Tensor, rows: TreeRowsInCache | None = None, path: Tensor | None = None
    ) -> None:
        """Move the accepted paths' rows into the linear slots, before the step ends: the next may
        find these blocks by their hash. num_sampled [R] int32: how many nodes of each path count;
        rows and path [>= R, K+1] int32: of an earlier step.
        """
        rows = self.rows if rows is None else rows
        path = self.path if path is None else path
        for slot_mapping, tables in zip(rows.slot_mappings, self._caches, strict=True):
            for table in tables:
                compact_kv(table, path, num_sampled, rows.row_start, slot_mapping)


def _cache_tables(caches: Iterable[Tensor]) -> list[CacheTable]:
    """The caches of a group's layers as few tables; one launch each. Layers may share a cache."""

    def layout(cache: Tensor) -> tuple[Any, ...]:
        return (*cache.shape, *cache.stride(), str(cache.dtype))

    unique = sorted({c.data_ptr(): c for c in caches}.values(), key=layout)
    # A row of K and V together is contiguous, so both move at once.
    return [
        CacheTable.of([cache.transpose(1, 2) for cache in same])
        for _, same in groupby(unique, key=layout)
    ]


class TreeTable:
    """What a step reads of the drafts before it, by request slot.

    Attributes:
        config: replaced before the first draft, if at all.
        trees: drafted last; the entry past the slots takes what padding rows draft.
        of_requests: [4, slots + 1] int32 on the device, 1 for those that get a chain, each one's
            maximum of nodes, and the origins of `AnswerStore`.
        wants_nodes, samples: [slots] bool on the host: is that above 0, and the temperature?
        budget: whether to draft and how many nodes to verify; None: always, and all.
        earlier: answers of finished requests; None where none are kept.
    """

    def __init__(self, config: ReDrafterConfig, slots: int, device: torch.device) -> None:
        self.config = config
        nodes = config.num_speculative_tokens
        self.trees = ScoredTrees(slots + 1, nodes, device)
        self.trees.clear()
        # One launch for all that a step admits; and one for their trees.
        self.of_requests = StagedWriteTensor((4, slots + 1), dtype=torch.int32, device=device)
        self.wants_nodes, self.samples = np.zeros((2, slots), dtype=np.bool_)
        self._num_nodes = StagedWriteTensor(slots + 1, dtype=torch.int32, device=device)
        self._num_nodes.gpu = self.trees.num_nodes
        self.verification = Verification(slots, nodes, device)
        self.meter = StepTimer(device)
        self.budget: TreeBudget | None = None
        self.earlier: EarlierAnswers | None = None

    def add_request(self, slot: int, chain: bool, limit: int, samples: bool) -> None:
        """A new request, with its root alone. vLLM may pad it to a verification nonetheless."""
        self._num_nodes.stage_write_elem(slot, 1)
        for row, value in enumerate((int(chain), limit)):
            self.of_requests.stage_write(row, slot, [value])
        self.wants_nodes[slot], self.samples[slot] = limit > 0, samples

    def apply_staged_writes(self) -> None:
        self._num_nodes.apply_write()
        self.of_requests.apply_write()
