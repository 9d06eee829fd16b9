"""vLLM's Triton attention backend, extended by tree attention.

Rows that are no tree (prefill chunks, decodes without a draft) stay with vLLM's kernel; tree rows,
which come first, go through `tree_attention`, chains among them. In a CUDA graph of uniform
decoding steps all rows are tree rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_redrafter.engine.v2.refusals import layer_refusals
from vllm_redrafter.errors import ConfigError
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees
from vllm_redrafter.triton_kernels.tree_attention import tree_attention
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS


@dataclass(frozen=True)
class TreeRows:
    """Which of a step's rows are trees' rows: the first ones.

    Attributes:
        staged: the trees, in the batch's order.
        requests: how many requests, the batch's first, are trees.
        rows: how many rows they have together.
        max_nodes: at least the most rows of one of them.
        fewest: how few of them may have all of these rows: a graph is captured before it is known.
        rest: [the other requests + 1] int32, where their rows start, counted from the first that
            is no tree's; None where there are none.
    """

    staged: StagedTrees
    requests: int
    rows: int
    max_nodes: int
    fewest: int
    rest: Tensor | None


@dataclass
class TreeAttentionMetadata(TritonAttentionMetadata):
    """vLLM's metadata of one step and KV cache group, with the step's trees.

    Attributes:
        trees: None in steps without any.
        rest: the metadata of the rows that are no tree's; None where there are none.
    """

    trees: TreeRows | None = None
    rest: TritonAttentionMetadata | None = None

    def set_trees(self, trees: TreeRows | None) -> None:
        """Split the batch into trees and the rest."""
        self.trees, self.rest = trees, None
        if trees is not None and trees.rest is not None:
            whole: Any = self  # mypy does not see the fields that are vLLM's
            self.rest = replace(
                whole,
                trees=None,
                num_actual_tokens=self.num_actual_tokens - trees.rows,
                query_start_loc=trees.rest,
                seq_lens=self.seq_lens[trees.requests :],
                block_table=self.block_table[trees.requests :],
            )


class TreeAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    # Which rows are trees' is known on the host; only where all are, can a graph hold it.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        """How many rows a request may have in a graph where all are trees: lengths are read on the
        device, so a graph holds trees of any sizes up to K nodes and the root."""
        return int(vllm_config.num_speculative_tokens) + 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return TreeAttentionMetadata(**vars(plain))


class TreeAttentionImpl(TritonAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The layer would quantise queries for vLLM's kernel; both kernels take them as they are.
        self.supports_quant_query_input = False
        for reason in layer_refusals(self):
            raise ConfigError(
                f"ReDrafter cannot verify trees in an attention layer of this target: {reason}; "
                "leave the speculative config out to run it"
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Tree attention's output is never quantised, so `output_scale` must not be given."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As vLLM's, the first rows of `output` being tree attention's."""
        trees = getattr(attn_metadata, "trees", None)
        if trees is None:
            return super().forward(
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
        assert isinstance(attn_metadata, TreeAttentionMetadata)
        self._attend_trees(layer, query, kv_cache, attn_metadata, trees, output)
        if attn_metadata.rest is not None:
            others = slice(trees.rows, None)
            super().forward(
                layer,
                query[others],
                key[others],
                value[others],
                kv_cache,
                attn_metadata.rest,
                output[others],
            )
        return output

    def _attend_trees(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        metadata: TreeAttentionMetadata,
        trees: TreeRows,
        output: Tensor,
    ) -> None:
        cache = kv_cache.transpose(1, 2)
        key_cache, value_cache = cache[..., : self.head_size], cache[..., self.head_size :]
        quantised = self.kv_cache_dtype.startswith("fp8")
        if quantised:
            key_cache = key_cache.view(self.fp8_dtype)
            value_cache = value_cache.view(self.fp8_dtype)
        staged, requests, table = trees.staged, trees.requests, metadata.block_table
        # It sizes the launch; a context this close to the table's end has fewer nodes after it.
        room = table.shape[1] * key_cache.shape[1] - trees.max_nodes
        tree_attention(
            query[: trees.rows],
            key_cache,
            value_cache,
            table[:requests],
            staged.context_lens[:requests],
            metadata.query_start_loc[: requests + 1],
            staged.ancestors,
            trees.max_nodes,
            min(metadata.max_seq_len, room),
            out=output[: trees.rows],
            scale=self.scale,
            depths=staged.depths,
            sliding_window=self.sliding_window[0] + 1,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            key_scale=layer._k_scale_float if quantised else 1.0,
            value_scale=layer._v_scale_float if quantised else 1.0,
            min_requests=trees.fewest,
        )


class TreeAttentionBackend(TritonAttentionBackend):
    """Registered by our workers, in their processes only."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return TreeAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_DIMS

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Tiles of rows and parts of keys depend on the batch, and with them the rounding."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False
