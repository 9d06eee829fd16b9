# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention backend, with token trees as sequences over copied K and V."""

from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor
from vllm import envs
from vllm._custom_ops import cpu_attn_get_scheduler_metadata
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.engine.cpu.cache_layout import cache_layout
from vllm_redrafter.engine.cpu.tree_sequences import CopiedUnits, PathCopies, tree_parts
from vllm_redrafter.engine.cpu.verification import VerificationStep


@dataclass(kw_only=True)
class _TreeMetadata(CPUAttentionMetadata):
    """Metadata of a step that has branching trees.

    Attributes:
        in_place: of the other rows, which are read where they lie; None where there are none.
        parts: of the trees, over what is copied for them.
    """

    in_place: CPUAttentionMetadata | None
    parts: list[tuple[CPUAttentionMetadata, PathCopies]]
    copied: CopiedUnits
    stats: StepStats


class _TreeMetadataBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layout = cache_layout(self.isa, self.head_dim, self.block_size, self.dtype)
        self._copied = CopiedUnits(layout)

    def with_trees(
        self, plain: CPUAttentionMetadata, step: VerificationStep, stats: StepStats
    ) -> _TreeMetadata:
        branching = step.branching
        tree = step.tree.select(branching)
        in_place = None
        if len(branching) < len(plain.seq_lens):
            # The kernel reads all rows; those of the trees are overwritten after it.
            seq_lens = plain.seq_lens.index_copy(0, branching, tree.num_nodes)
            in_place = self._of(plain, plain.query_start_loc, seq_lens, plain.block_table)
        parts = tree_parts(
            tree,
            step.root_rows[branching],
            plain.seq_lens[branching] - tree.num_nodes,
            plain.block_table[branching],
            self.block_size,
            self.window_size,
            2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize,
        )
        return _TreeMetadata(
            **vars(plain),
            in_place=in_place,
            parts=[(self._of(plain, *sequences), copies) for sequences, copies in parts],
            copied=self._copied,
            stats=stats,
        )

    def _of(
        self,
        plain: CPUAttentionMetadata,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
    ) -> CPUAttentionMetadata:
        schedule = cpu_attn_get_scheduler_metadata(
            num_reqs=len(seq_lens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=seq_lens,
            dtype=self.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return replace(
            plain,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            scheduler_metadata=schedule,
        )


class _TreeAttentionImpl(CPUAttentionBackendImpl):
    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            # vLLM leaves the memory as it was: a mixture would choose experts by it while costs
            # are measured.
            return output.zero_()
        behind = output, output_scale, output_block_scale
        if not isinstance(attn_metadata, _TreeMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *behind)
        attend = partial(super().forward, layer, query, key, value)
        if attn_metadata.in_place is not None:
            attend(kv_cache, attn_metadata.in_place, *behind)
        started = perf_counter()
        for metadata, copies in attn_metadata.parts:
            attend(attn_metadata.copied.write(copies, kv_cache), metadata, *behind)
        attn_metadata.stats.attention += perf_counter() - started
        return output


class TreeAttentionBackend(CPUAttentionBackend):
    """Registered in place of CPU_ATTN by our worker, and in its process only."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return _TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return _TreeMetadataBuilder
