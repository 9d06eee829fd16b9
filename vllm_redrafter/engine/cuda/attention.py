# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention backend, extended by tree attention.

Rows that are no tree (prefill chunks, decodes without a draft) stay with vLLM's kernels:
FlashAttention where it can read this cache and no image is read whose tokens see one another
(PrefixLM), else Triton's. Tree rows, which come first, go through `TreeAttention`, chains among
them. In a CUDA graph of decoding steps all rows are tree rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor, cat
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_redrafter.engine.cuda.flash_attention import flash_attention, flash_attention_metadata
from vllm_redrafter.engine.cuda.image_spans import spans_read
from vllm_redrafter.engine.cuda.refusals import layer_obstacles
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees
from vllm_redrafter.triton_kernels.tree_attention import TreeAttention
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
    rest: TreeAttentionMetadata | None = None
    _tree_attention: TreeAttention | None = field(default=None, init=False)
    _for_flash_attention: FlashAttentionMetadata | None = field(default=None, init=False)
    _rest_for_triton: TreeAttentionMetadata | None = field(default=None, init=False)

    def set_trees(self, trees: TreeRows | None) -> None:
        """Split the batch into trees and the rest."""
        self.trees, self.rest = trees, None
        self._tree_attention = self._for_flash_attention = self._rest_for_triton = None
        if trees is not None and trees.rest is not None:
            whole: Any = self  # mypy does not see the fields that are vLLM's
            # Neither more nor fewer: FlashAttention compares the numbers of requests.
            others = slice(trees.requests, trees.requests + trees.rest.shape[0] - 1)
            self.rest = replace(
                whole,
                trees=None,
                num_actual_tokens=self.num_actual_tokens - trees.rows,
                query_start_loc=trees.rest,
                seq_lens=self.seq_lens[others],
                block_table=self.block_table[others],
            )

    def tree_attention(self, block_size: int) -> TreeAttention:
        """Of the step's trees; made by its first layer, as all layers of the group share it."""
        if self._tree_attention is None:
            assert self.trees is not None
            trees, staged, requests = self.trees, self.trees.staged, self.trees.requests
            table = self.block_table[:requests]
            self._tree_attention = TreeAttention(
                table,
                staged.context_lens[:requests],
                self.query_start_loc[: requests + 1],
                staged.ancestors,
                trees.max_nodes,
                # Not the step's longest: what a launch is compiled for would change with it. A
                # context this close to the table's end has fewer nodes after it.
                table.shape[1] * block_size - trees.max_nodes,
                depths=staged.depths,
                min_requests=trees.fewest,
            )
        return self._tree_attention

    def rest_for_triton(self) -> TreeAttentionMetadata:
        """`rest` for vLLM's Triton kernel, made by the first layer that asks.

        Triton compiles a kernel anew, for seconds in which all requests wait, where a tensor begins
        at an address that is no multiple of 16 bytes, and where a number is 1. vLLM has it compiled
        for whole batches only, so lengths and block table are copies of their own, and a request
        without rows stands behind the others.
        """
        if self._rest_for_triton is None:
            rest: Any = self.rest
            starts, lengths, table = rest.query_start_loc, rest.seq_lens, rest.block_table
            requests, columns = table.shape
            spans = self.mm_prefix_range_tensor
            if spans is not None:
                assert self.trees is not None
                spans = spans[self.trees.requests :]
                spans = cat([spans, spans.new_zeros(1, *spans.shape[1:])])
            copied = table.new_zeros(requests + 1, table.stride(0))[:, :columns]
            copied[:requests] = table
            self._rest_for_triton = replace(
                rest,
                query_start_loc=cat([starts, starts[-1:]]),
                seq_lens=cat([lengths, lengths.new_zeros(1)]),
                block_table=copied,
                mm_prefix_range_tensor=spans,
            )
        return self._rest_for_triton

    def for_flash_attention(self) -> FlashAttentionMetadata:
        """Of the whole batch, made by the first layer that asks."""
        if self._for_flash_attention is None:
            self._for_flash_attention = flash_attention_metadata(self)
        return self._for_flash_attention


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
        if common_attn_metadata.mm_req_doc_ranges is not None:
            spans = spans_read(common_attn_metadata)
            common_attn_metadata = replace(common_attn_metadata, mm_req_doc_ranges=spans)
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return TreeAttentionMetadata(**vars(plain))


class TreeAttentionImpl(TritonAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The layer would quantise queries for vLLM's kernel; both kernels take them as they are.
        self.supports_quant_query_input = False
        self.tree_obstacles = tuple(layer_obstacles(self))
        # Where there are some, only chains are verified, and only by vLLM's own kernel.
        self._flash_attention = None if self.tree_obstacles else flash_attention(self)

    def leave_to_triton(self) -> None:
        """Read all rows through vLLM's Triton kernel, in CUDA graphs as well."""
        self._flash_attention = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Tree attention's output is never quantised, so `output_scale` must not be given."""
        return False

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """By FlashAttention's kernel where it reads the cache. C++ launches it; vLLM's Triton one
        takes the host longer, and in steps that read prompts the GPU waits for the host."""
        if self._flash_attention is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            self._flash_attention.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As vLLM's, the first rows of `output` being tree attention's."""
        assert output_scale is None and output_block_scale is None, "see above"
        if attn_metadata is None:  # a profiling run
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        assert isinstance(attn_metadata, TreeAttentionMetadata)
        trees, rest = attn_metadata.trees, attn_metadata.rest
        if trees is None:
            self._attend_others(layer, query, key, value, kv_cache, attn_metadata, output)
            return output
        self._attend_trees(
            layer, query[: trees.rows], kv_cache, attn_metadata, output[: trees.rows]
        )
        if rest is not None:
            others = slice(trees.rows, None)
            # A layer that reads another's cache has no K and V of its own.
            key, value = (None if new is None else new[others] for new in (key, value))
            if self._takes_triton(attn_metadata):
                rest = attn_metadata.rest_for_triton()
            self._attend_others(layer, query[others], key, value, kv_cache, rest, output[others])
        return output

    def _takes_triton(self, metadata: TreeAttentionMetadata) -> bool:
        """Do the step's rows that are no tree's go through Triton in this layer?"""
        return self._flash_attention is None or metadata.mm_prefix_range_tensor is not None

    def _attend_others(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: TreeAttentionMetadata,
        output: Tensor,
    ) -> None:
        if self._takes_triton(metadata):
            super().forward(layer, query, key, value, kv_cache, metadata, output)
        else:
            assert self._flash_attention is not None
            step = metadata.for_flash_attention()
            self._flash_attention.forward(layer, query, key, value, kv_cache, step, output)

    def _attend_trees(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        metadata: TreeAttentionMetadata,
        output: Tensor,
    ) -> None:
        cache = kv_cache.transpose(1, 2)
        key_cache, value_cache = cache[..., : self.head_size], cache[..., self.head_size :]
        quantised = self.kv_cache_dtype.startswith("fp8")
        if quantised:
            key_cache = key_cache.view(self.fp8_dtype)
            value_cache = value_cache.view(self.fp8_dtype)
        metadata.tree_attention(key_cache.shape[1]).attend(
            query,
            key_cache,
            value_cache,
            output,
            scale=self.scale,
            sliding_window=self.sliding_window[0] + 1,
            soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            key_scale=layer._k_scale_float if quantised else 1.0,
            value_scale=layer._v_scale_float if quantised else 1.0,
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
