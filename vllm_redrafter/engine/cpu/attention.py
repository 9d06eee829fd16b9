"""vLLM's CPU attention backend, extended by tree attention.

Rows that are no tree (prefill chunks, plain decodes, chains) stay with vLLM's C++ kernel: linear
positions and a causal mask are exact for them. Tree rows go through `paged_tree_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_redrafter.engine.cpu.kv_cache import key_value_rows
from vllm_redrafter.engine.cpu.tree_attention import (
    AttentionVariant,
    TreeQueries,
    paged_tree_attention,
)
from vllm_redrafter.engine.cpu.tree_gather import Workspace
from vllm_redrafter.engine.stats import StepStats


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata of one step and KV cache group, with the step's trees.

    Attributes:
        trees: the requests whose tree is not a chain; None where there is none.
        block_size: tokens per cache block.
        amx: the cache is laid out for AMX, see `kv_cache.key_value_views`.
        workspace: memory that tree attention uses again in each layer and step.
        only_trees: no other request is in the batch, so vLLM's kernel has nothing to do.
        stats: where the time spent is added.
    """

    trees: TreeQueries | None = None
    block_size: int = 0
    amx: bool = False
    workspace: Workspace = field(default_factory=Workspace)
    only_trees: bool = False
    stats: StepStats | None = None


class TreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._workspace = Workspace()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return TreeAttentionMetadata(
            **vars(plain),
            block_size=self.block_size,
            amx=self.isa == "amx",
            workspace=self._workspace,
        )


class TreeAttentionImpl(CPUAttentionBackendImpl):
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
        """As vLLM's; tree rows of `output` are then written by tree attention."""
        assert attn_metadata is None or isinstance(attn_metadata, TreeAttentionMetadata)
        if attn_metadata is None or not attn_metadata.only_trees:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if attn_metadata is not None and attn_metadata.trees is not None:
            started = perf_counter()
            trees, workspace = attn_metadata.trees, attn_metadata.workspace
            paged_tree_attention(query, kv_cache, trees, self._variant(), output, workspace)
            if attn_metadata.stats is not None:
                attn_metadata.stats.attention += perf_counter() - started
        return output

    def _variant(self) -> AttentionVariant:
        return AttentionVariant(
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )


class TreeAttentionBackend(CPUAttentionBackend):
    """Registered in place of CPU_ATTN by our worker, and in its process only."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return TreeAttentionMetadataBuilder


def check_cache_layout(isa: str, head_size: int, block_size: int, dtype: torch.dtype) -> None:
    """Prove on a scratch block that vLLM writes the cache in the layout that we read.

    Raises:
        RuntimeError: it does not; decoding would be wrong.
    """
    from vllm import _custom_ops as ops

    cache = torch.zeros(1, 1, block_size, 2 * head_size, dtype=dtype)
    keys, values = cache.view(1, 1, 2 * block_size, head_size).chunk(2, dim=2)
    rows = torch.randn(2, block_size, 1, head_size).to(dtype)
    slots = torch.arange(block_size)
    ops.cpu_attn_reshape_and_cache(
        rows[0], rows[1], keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    written = key_value_rows(cache, amx=isa == "amx")
    if not all(torch.equal(w[0, 0], row[:, 0]) for w, row in zip(written, rows, strict=True)):
        raise RuntimeError(
            f"vLLM's CPU attention stores its KV cache in a layout that ReDrafter does not know "
            f"(instruction set {isa!r}, head size {head_size}, block size {block_size}, {dtype}); "
            "on this processor, run without --spec-model, or report it with this message"
        )
