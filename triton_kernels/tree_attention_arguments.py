# SPDX-License-Identifier: Apache-2.0
"""What `TreeAttention` takes, and what it refuses: each message names the argument."""

import torch
import triton
from torch import Tensor

from vllm_redrafter.config import MAX_NODES, WORD_BITS
from vllm_redrafter.triton_kernels.checks import (
    require,
    require_last_dim_contiguous,
    require_same_device,
)

HEAD_DIMS = (64, 80, 96, 128, 256, 512)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_step(
    block_table: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    ancestors: Tensor,
    depths: Tensor | None,
    max_nodes: int,
) -> None:
    """What the layers of a step share."""
    tensors = {
        "block_table": block_table,
        "context_lens": context_lens,
        "query_start_loc": query_start_loc,
        "ancestors": ancestors,
    } | ({} if depths is None else {"depths": depths})
    for name, tensor in tensors.items():
        require(tensor.dtype == torch.int32, f"{name}: expected torch.int32, got {tensor.dtype}")
    require_last_dim_contiguous(**tensors)
    require(block_table.dim() == 2, f"block_table: expected [R, blocks], got {block_table.dim()}D")
    requests = context_lens.shape[0]
    require(
        query_start_loc.shape[0] == requests + 1 and block_table.shape[0] >= requests,
        f"query_start_loc and block_table must have {requests + 1} and {requests} entries for "
        f"context_lens' {requests}, got {query_start_loc.shape[0]} and {block_table.shape[0]}",
    )
    require(1 <= max_nodes <= MAX_NODES, f"max_nodes must be 1 to {MAX_NODES}, got {max_nodes}")
    require(
        ancestors.dim() == 3
        and ancestors.shape[0] >= requests
        and ancestors.shape[1] >= max_nodes
        and ancestors.shape[2] * WORD_BITS >= max_nodes,
        f"ancestors: {list(ancestors.shape)} has no room for {requests} trees of {max_nodes} nodes",
    )
    if depths is not None:
        require(
            depths.dim() == 2 and depths.shape[0] >= requests and depths.shape[1] >= max_nodes,
            f"depths: {list(depths.shape)} has no room for [{requests}, {max_nodes}]",
        )


def check_layer(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, sinks: Tensor | None
) -> None:
    """What a layer brings."""
    require(query.dtype in QUERY_DTYPES, f"query: dtype {query.dtype} is not supported")
    require(query.dim() == 3, f"query: expected [rows, heads, head_dim], got {list(query.shape)}")
    require(
        query.shape[2] in HEAD_DIMS,
        f"query: head_dim {query.shape[2]} is not supported, only {HEAD_DIMS}",
    )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        require(
            cache.dtype in (query.dtype, torch.float8_e4m3fn),
            f"{name}: dtype {cache.dtype} is neither query's ({query.dtype}) nor fp8 e4m3",
        )
        require(
            cache.dim() == 4 and cache.shape[3] == query.shape[2],
            f"{name}: expected [blocks, block_size, KV heads, {query.shape[2]}], "
            f"got {list(cache.shape)}",
        )
        require(
            query.shape[1] % cache.shape[2] == 0,
            f"{name}: {cache.shape[2]} KV heads do not divide query's {query.shape[1]} heads",
        )
    require(
        value_cache.shape == key_cache.shape,
        f"value_cache: expected key_cache's shape {list(key_cache.shape)}, "
        f"got {list(value_cache.shape)}",
    )
    require(
        out.shape == query.shape and out.dtype == query.dtype,
        f"out: expected query's {list(query.shape)} {query.dtype}, "
        f"got {list(out.shape)} {out.dtype}",
    )
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache, "out": out}
    if sinks is not None:
        require(
            sinks.shape == query.shape[1:2] and sinks.is_floating_point(),
            f"sinks: expected [{query.shape[1]}] floats, got {list(sinks.shape)} {sinks.dtype}",
        )
        tensors["sinks"] = sinks
    require_last_dim_contiguous(**tensors)
    require_same_device(query, **tensors)


def check_sizes(block_table: Tensor, max_nodes: int, max_context_len: int, block_size: int) -> None:
    """What is between a step and the caches of its layers."""
    needed = triton.cdiv(max_context_len + max_nodes, block_size)
    require(
        block_table.shape[1] >= needed,
        f"block_table: {block_table.shape[1]} blocks of {block_size} per request are too few for "
        f"max_context_len {max_context_len} and {max_nodes} nodes, which need {needed}",
    )
