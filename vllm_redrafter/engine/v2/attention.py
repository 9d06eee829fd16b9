# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention backend, extended by tree attention.

Tree rows come first in a batch and go through `TreeAttention`. Other rows (prefill chunks, decodes
without a draft) stay with vLLM's kernels: FlashAttention where it can read this cache and no image
is read whose tokens see one another (PrefixLM), else Triton's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor, cat
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_redrafter.engine.v2.flash_attention import flash_attention
from vllm_redrafter.engine.v2.refusals import layer_obstacles
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees
from vllm_redrafter.triton_kernels.tree_attention import TreeAttention
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS

Spans = dict[int, list[tuple[int, int]]]
"""By the request's place in the batch, the first and last position of each of its images."""


@dataclass(frozen=True)
class TreeRows:
    """A step's tree rows, which come first.

    Attributes:
        staged: the trees, in the batch's order.
        requests: how many requests, the batch's first, are trees.
        rows: how many rows they have together.
        max_nodes: upper bound of a tree's rows.
        fewest: lower bound of the requests that share these rows; a graph is captured before.
        rest: [other requests + 1] int32, where their rows start after the tree rows, if any.
        starts: [requests + 1] int32, where tree rows start in a graph with prompts. It is captured
            before it is known which are trees': `requests`, `rows` and `rest` are then of all
            requests, each of which has its rows in one of the two lists.
    """

    staged: StagedTrees
    requests: int
    rows: int
    max_nodes: int
    fewest: int
    rest: Tensor | None
    starts: Tensor | None = None


@dataclass
class TreeAttentionMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step and KV cache group; `rest` is that of its rows outside of trees."""

    trees: TreeRows | None = None
    rest: TreeAttentionMetadata | None = None
    max_num_splits: int = 0
    _tree_attention: TreeAttention | None = field(default=None, init=False)
    _for_flash_attention: FlashAttentionMetadata | None = field(default=None, init=False)
    _rest_for_triton: TreeAttentionMetadata | None = field(default=None, init=False)

    def set_trees(self, trees: TreeRows | None) -> None:
        self.trees, self.rest = trees, None
        self._tree_attention = self._for_flash_attention = self._rest_for_triton = None
        if trees is not None and trees.rest is not None:
            whole: Any = self  # mypy does not see the fields that are vLLM's
            mixed = trees.starts is not None
            first, rows = (0, 0) if mixed else (trees.requests, trees.rows)
            # Neither more nor fewer: FlashAttention compares the numbers of requests.
            others = slice(first, first + trees.rest.shape[0] - 1)
            self.rest = replace(
                whole,
                trees=None,
                max_num_splits=int(mixed),  # 0: FlashAttention's choice, which no graph can follow
                num_actual_tokens=self.num_actual_tokens - rows,
                query_start_loc=trees.rest,
                seq_lens=self.seq_lens[others],
                block_table=self.block_table[others],
            )

    def tree_attention(self, block_size: int) -> TreeAttention:
        """Made by the step's first layer; all layers of the group share it."""
        if self._tree_attention is None:
            assert self.trees is not None
            trees, staged, requests = self.trees, self.trees.staged, self.trees.requests
            table = self.block_table[:requests]
            self._tree_attention = TreeAttention(
                table,
                staged.context_lens[:requests],
                self.query_start_loc[: requests + 1] if trees.starts is None else trees.starts,
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
        """`rest` for vLLM's Triton kernel, in tensors for which it is compiled already.

        Triton compiles anew, for seconds in which all requests wait, for an address that is no
        multiple of 16 bytes and for a size of 1. So tensors are copied, with an empty request last.
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
        if self._for_flash_attention is None:
            self._for_flash_attention = FlashAttentionMetadata(
                num_actual_tokens=self.num_actual_tokens,
                max_query_len=self.max_query_len,
                query_start_loc=self.query_start_loc,
                max_seq_len=self.max_seq_len,
                seq_lens=self.seq_lens,
                block_table=self.block_table,
                slot_mapping=self.slot_mapping,
                causal=self.causal,
                max_num_splits=self.max_num_splits,
            )
        return self._for_flash_attention


class _MetadataBuilder(TritonAttentionMetadataBuilder):
    # Of vLLM's sizes, graphs of decoding steps alone; graph_manager.py adds those with prompts.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> int | None:
        """K + 1: lengths are read on the device, so a graph holds trees of any size."""
        return int(vllm_config.num_speculative_tokens) + 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        if common_attn_metadata.mm_req_doc_ranges is not None:
            spans = _spans_read(common_attn_metadata)
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
        self.flash_attention = None if self.tree_obstacles else flash_attention(self)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Tree attention's output is never quantised, so `output_scale` must not be given."""
        return False

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """By FlashAttention's kernel where it reads the cache: C++ launches it faster than Python
        launches vLLM's Triton one, and in steps that read prompts the GPU waits for the host.
        """
        if self.flash_attention is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            self.flash_attention.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

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
            others = slice(attn_metadata.num_actual_tokens - rest.num_actual_tokens, None)
            # A layer that reads another's cache has no K and V of its own.
            key, value = (None if new is None else new[others] for new in (key, value))
            if self._takes_triton(attn_metadata):
                rest = attn_metadata.rest_for_triton()
            self._attend_others(layer, query[others], key, value, kv_cache, rest, output[others])
        return output

    def _takes_triton(self, metadata: TreeAttentionMetadata) -> bool:
        """Does this layer read rows outside of trees by Triton?"""
        return self.flash_attention is None or metadata.mm_prefix_range_tensor is not None

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
            assert self.flash_attention is not None
            step = metadata.for_flash_attention()
            self.flash_attention.forward(layer, query, key, value, kv_cache, step, output)

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
        return _MetadataBuilder

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
        """No: tiles of rows and parts of keys, hence rounding, depend on the batch."""
        return False


def _spans_read(step: CommonAttentionMetadata) -> Spans | None:
    """The images of which a step reads a token. vLLM names all images in each step."""
    images, reading = step.mm_req_doc_ranges, step.is_prefilling
    lengths = step.seq_lens_cpu_upper_bound  # exact where a prompt is read
    assert images is not None and reading is not None and lengths is not None
    read: Spans = {}
    for request in reading.nonzero().flatten().tolist():
        first, behind = step.query_start_loc_cpu[request : request + 2].tolist()
        end = int(lengths[request])
        begin = end - (behind - first)
        read[request] = [span for span in images[request] if span[0] < end and span[1] >= begin]
    return read if any(read.values()) else None
