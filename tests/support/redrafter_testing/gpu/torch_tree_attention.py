# SPDX-License-Identifier: Apache-2.0
"""Tree attention by torch, in float64: faster on a CPU; tests/triton_kernels checks the kernel."""

from typing import Any

import torch
from torch import Tensor

from redrafter_testing.gpu.torch_flash_attention import rows_in_cache


def attend(
    step: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    sinks: Tensor | None,
    key_scale: float,
    value_scale: float,
) -> None:
    """See `TreeAttention.attend`, which this replaces."""
    starts, bit = step.query_start_loc.tolist(), torch.arange(32, dtype=torch.int32)
    for request, context in enumerate(step.context_lens.tolist()):
        own = slice(starts[request], starts[request + 1])
        nodes = own.stop - own.start
        if not nodes:
            continue
        block_table, length = step.block_table[request], context + nodes
        keys = rows_in_cache(key_cache, block_table, length, query) * key_scale
        values = rows_in_cache(value_cache, block_table, length, query) * value_scale
        scores = torch.einsum("qhd,phd->hqp", query[own].double(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        in_tree = (step.ancestors[request, :nodes, :, None] >> bit & 1).flatten(1)[:, :nodes]
        seen = torch.cat([in_tree.new_ones(nodes, context), in_tree], dim=1).bool()
        if sliding_window:
            depths = step.depths[request, :nodes]
            positions = torch.cat([torch.arange(-context, 0), depths])
            seen &= depths[:, None] - positions < sliding_window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            without_key = sinks.double()[:, None, None].expand(-1, nodes, 1)
            scores = torch.cat([scores, without_key], dim=2)
        weights = scores.softmax(dim=2)[:, :, :length]
        out[own] = torch.einsum("hqp,phd->qhd", weights, values).to(out.dtype)


def use() -> None:
    """In this process, for all layers."""
    from vllm_redrafter.triton_kernels.tree_attention import TreeAttention

    TreeAttention.attend = attend
