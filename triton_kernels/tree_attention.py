# SPDX-License-Identifier: Apache-2.0
"""Tree attention over a paged KV cache, for decoding steps that verify token trees.

R requests each bring up to 128 query nodes. Node i of a request with context length n attends to
the context, positions [0, n), and among the tree's own rows, which lie in the cache at positions
n .. n+T-1 in node order, to its ancestors and itself (a bit set). For a row with query q:

    s_j = scale * q . k_j, capped to c * tanh(s_j / c) where there is a cap c
    out = sum_j e^{s_j} v_j / (sum_j e^{s_j} + e^{sink})

Verification is bound by memory like plain decoding, so K and V are read once per request and KV
head: the group's query heads and all nodes are the rows of one product. (Rows beyond a tile's are
in further tiles, which read them again, mostly from L2.) The keys are split into parts, as in
flash-decoding, so that few requests fill the GPU, and no long context is read by one program; a
second kernel merges the parts, each with the log-sum-exp of its scores:

    m = max_p lse_p,    out = sum_p e^{lse_p - m} out_p / sum_p e^{lse_p - m}

A plain decode is a tree of one node and may be in the same launch. Chunks of a prompt may not:
with more than 128 queries they are bound by arithmetic, and vLLM's own kernels are made for them.

Shapes are fixed by the arguments' sizes, lengths are read on the device: launches can be captured
in CUDA graphs, and nothing waits for the host.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_same_device
from vllm_redrafter.triton_kernels.registers import register_limit
from vllm_redrafter.triton_kernels.tree_attention_arguments import (
    check_layer,
    check_sizes,
    check_step,
)
from vllm_redrafter.triton_kernels.tree_attention_kernels import _attend_part, _merge_parts
from vllm_redrafter.triton_kernels.tree_attention_plan import KeySplit, plan_split
from vllm_redrafter.triton_kernels.tree_attention_tiles import (
    Tile,
    choose_tile,
    compute_capability,
    padded,
)


@dataclass(frozen=True)
class _Launch:
    """What follows from the shapes of a layer's tensors, and is found once for all such layers."""

    group: int
    block_dim: int
    tile: Tile
    row_tiles: int
    split: KeySplit
    block_parts: int


class TreeAttention:
    """One step's trees, for the attention of each of its layers.

    A step has dozens of layers of the same shapes: arguments are checked once, here or when the
    first layer of a shape is attended to.
    """

    def __init__(
        self,
        block_table: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor,
        ancestors: Tensor,
        max_nodes: int,
        max_context_len: int,
        *,
        depths: Tensor | None = None,
        min_requests: int | None = None,
    ) -> None:
        """Check what all layers share.

        Args:
            block_table: [R, blocks per request] int32.
            context_lens: [R] int32, n: keys in the cache before the tree.
            query_start_loc: [R+1] int32.
            ancestors: [R, >= max_nodes, words] int32 bit sets, self included
                (TokenTree.ancestors).
            max_nodes: at least the most nodes of any request, at most 128; sizes the launch.
            max_context_len: at least the largest context length; sizes the launch.
            depths: [R, >= max_nodes] int32; needed with a sliding window.
            min_requests: how many requests have rows at least, if it is not all of them: the
                programs by which the keys' parts are planned. A graph for up to R requests is
                captured without knowing how many there will be, and few need more parts each.

        Raises:
            ValueError: an argument's dtype, device, shape or stride does not fit; it is named.
        """
        check_step(block_table, context_lens, query_start_loc, ancestors, depths, max_nodes)
        requests = context_lens.shape[0]
        require(
            min_requests is None or 1 <= min_requests <= requests,
            f"min_requests must be between 1 and {requests}, got {min_requests}",
        )
        self.block_table, self.context_lens = block_table, context_lens
        self.query_start_loc, self.ancestors, self.depths = query_start_loc, ancestors, depths
        self.max_nodes, self.max_context_len = max_nodes, max_context_len
        self.min_requests = min_requests or requests
        self._launches: dict[tuple[object, ...], _Launch] = {}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        *,
        scale: float | None = None,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Attention of all nodes of all requests in one layer.

        Args:
            query: [rows, query heads, head_dim] fp16, bf16 or fp32; request r's nodes are rows
                query_start_loc[r] .. query_start_loc[r+1] - 1, in node order.
            key_cache: [blocks, block_size, KV heads, head_dim] in query's dtype or fp8 e4m3; any
                strides but that of the last dimension, which is 1 (vLLM's NHD and HND layouts are
                views of this shape).
            value_cache: likewise.
            out: like query. Rows of no request are not written.
            scale: multiplies q.k; None for 1 / sqrt(head_dim).
            sliding_window: keys this many positions back or more are hidden; 0 for none. A tree's
                positions are n + depth.
            soft_cap: 0 for none.
            sinks: [query heads] floats or None.
            key_scale, value_scale: what an fp8 cache's numbers are multiplied with.

        Raises:
            ValueError: as above.
        """
        layout = (sliding_window, *map(_layout, (query, key_cache, value_cache, out, sinks)))
        if layout not in self._launches:
            check_layer(query, key_cache, value_cache, out, sinks)
            self._launches[layout] = self._plan(query, key_cache, sliding_window)
        launch = self._launches[layout]
        tile, split = launch.tile, launch.split
        rows, heads, head_dim = query.shape
        requests = self.context_lens.shape[0]
        block_size, kv_heads = key_cache.shape[1:3]
        depths = self.depths if self.depths is not None else self.context_lens
        scale = head_dim**-0.5 if scale is None else scale

        several = split.parts > 1
        # Of one part no log-sum-exp is written: any tensor will do.
        part_out, part_lse = out.unsqueeze(2), query
        if several:
            part_out = query.new_empty((rows, heads, split.parts, head_dim), dtype=torch.float32)
            part_lse = query.new_empty(part_out.shape[:3], dtype=torch.float32)
        _attend_part[(requests, kv_heads * launch.row_tiles, split.parts)](
            query,
            key_cache,
            value_cache,
            self.block_table,
            self.context_lens,
            self.query_start_loc,
            self.ancestors,
            depths,
            sinks if sinks is not None else query,
            part_out,
            part_lse,
            scale * key_scale,
            value_scale,
            soft_cap,
            sliding_window,
            *split.numbers,
            query.stride(0),
            query.stride(1),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            self.block_table.stride(0),
            self.ancestors.stride(0),
            self.ancestors.stride(1),
            depths.stride(0),
            *part_out.stride()[:3],
            *part_lse.stride()[:2],
            GROUP=launch.group,
            HEAD_DIM=head_dim,
            BLOCK_DIM=launch.block_dim,
            BLOCK_SIZE=block_size,
            BLOCK_ROWS=tile.rows,
            BLOCK_KEYS=tile.keys,
            ROW_TILES=launch.row_tiles,
            SPLIT=several,
            HAS_CAP=soft_cap > 0,
            HAS_WINDOW=sliding_window > 0,
            HAS_SINKS=sinks is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **register_limit(tile.max_registers),
        )
        if several:
            self._merge(launch, part_out, part_lse, out, sliding_window, sinks)

    def _merge(
        self,
        launch: _Launch,
        part_out: Tensor,
        part_lse: Tensor,
        out: Tensor,
        sliding_window: int,
        sinks: Tensor | None,
    ) -> None:
        """Parts [rows, query heads, parts, head_dim] and [rows, query heads, parts] into `out`."""
        split, requests = launch.split, self.context_lens.shape[0]
        rows, heads, head_dim = out.shape
        _merge_parts[(rows, heads)](
            part_out,
            part_lse,
            self.context_lens,
            self.query_start_loc,
            sinks if sinks is not None else out,
            out,
            sliding_window,
            *split.numbers,
            *part_out.stride()[:3],
            *part_lse.stride()[:2],
            *out.stride()[:2],
            requests,
            requests.bit_length(),
            HEAD_DIM=head_dim,
            BLOCK_DIM=launch.block_dim,
            BLOCK_KEYS=launch.tile.keys,
            BLOCK_PARTS=launch.block_parts,
            HAS_WINDOW=sliding_window > 0,
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )

    def _plan(self, query: Tensor, key_cache: Tensor, sliding_window: int) -> _Launch:
        """How layers of these shapes are launched, after a check of what depends on both."""
        block_size, kv_heads = key_cache.shape[1:3]
        check_sizes(self.block_table, self.max_nodes, self.max_context_len, block_size)
        require_same_device(
            query,
            block_table=self.block_table,
            context_lens=self.context_lens,
            query_start_loc=self.query_start_loc,
            ancestors=self.ancestors,
            **({} if self.depths is None else {"depths": self.depths}),
        )
        require(
            sliding_window == 0 or self.depths is not None,
            "depths is needed with a sliding window: positions in a tree are n + depth",
        )
        rows, heads, head_dim = query.shape
        group = heads // kv_heads
        capability = compute_capability(query.device)
        tile = choose_tile(self.max_nodes * group, head_dim, query.dtype, capability)
        row_tiles = padded(self.max_nodes * group, tile.rows) // tile.rows
        seen = min(self.max_context_len, sliding_window or self.max_context_len)
        split = plan_split(
            programs=self.min_requests * kv_heads * row_tiles,
            max_keys=seen + self.max_nodes,
            bytes_per_part=4 * rows * heads * head_dim,
            device=query.device,
        )
        block_dim, block_parts = map(triton.next_power_of_2, (head_dim, split.parts))
        return _Launch(group, block_dim, tile, row_tiles, split, block_parts)


def _layout(tensor: Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
