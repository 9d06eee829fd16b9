"""vLLM's CPU attention backend, extended by tree attention.

Rows that are no tree (prefill chunks, plain decodes, chains) stay with vLLM's C++ kernel: linear
positions and a causal mask are exact for them. Tree rows go through `paged_tree_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionLayer
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
from vllm_redrafter.engine.cpu.verification import VerificationStep
from vllm_redrafter.engine.stats import StepStats


@dataclass(kw_only=True)
class TreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step and KV cache group, where a request has a tree that is no chain.

    Attributes:
        trees: of these requests.
        workspace: memory that tree attention uses again in each layer and step.
        only_trees: no other request is in the batch, so vLLM's kernel has nothing to do.
        stats: where the time spent is added.
    """

    trees: TreeQueries
    workspace: Workspace
    only_trees: bool
    stats: StepStats


class TreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes vLLM's metadata, to which the runner adds trees where a step has some.

    Attributes:
        workspace: see `TreeAttentionMetadata`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.workspace = Workspace()

    def with_trees(
        self, plain: CPUAttentionMetadata, step: VerificationStep, stats: StepStats
    ) -> TreeAttentionMetadata:
        """The metadata of a step that has trees; plain steps are spared even a copy of theirs."""
        # vLLM's kernel reads all rows or none: without prompts in the step it is not needed.
        only_trees = step.only_nodes
        requests = torch.arange(len(step.drafted)) if only_trees else step.branching
        tree = step.tree if only_trees else step.tree.select(requests)
        trees = TreeQueries(
            tree=tree,
            rows=step.node_rows[requests],
            context_lens=(plain.seq_lens[requests] - tree.num_nodes).long(),
            block_table=plain.block_table[requests],
            block_size=self.block_size,
            amx=self.isa == "amx",
        )
        return TreeAttentionMetadata(
            **vars(plain), trees=trees, workspace=self.workspace, only_trees=only_trees, stats=stats
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
        with_trees = attn_metadata if isinstance(attn_metadata, TreeAttentionMetadata) else None
        if with_trees is None or not with_trees.only_trees:
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
        if with_trees is not None:
            started = perf_counter()
            trees, workspace = with_trees.trees, with_trees.workspace
            paged_tree_attention(query, kv_cache, trees, self._variant(), output, workspace)
            with_trees.stats.attention += perf_counter() - started
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
