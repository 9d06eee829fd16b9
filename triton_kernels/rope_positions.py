# SPDX-License-Identifier: Apache-2.0
"""Positions of a tree's rows for targets whose rows have several each (M-RoPE).

vLLM gives a decoding row the position n + delta in every dimension, where delta depends on the
request's images. So a node's are those of its tree's root + its depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees


@triton.jit
def _add_depths(
    cu_num_logits,  # [R+1] int32
    num_nodes,  # [R] int32
    row_start,  # [R] int32
    depths,  # [R, SLOTS] int32
    positions,  # [DIMENSIONS, rows] int64, changed
    dimension_stride,
    DIMENSIONS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request of the batch; rows beyond its tree, which hold padding, get the root's."""
    request = tl.program_id(0)
    logits = tl.load(cu_num_logits + request + 1) - tl.load(cu_num_logits + request)
    node = tl.arange(0, BLOCK)
    is_node = node < tl.minimum(tl.load(num_nodes + request), logits)
    depth = tl.load(depths + request * SLOTS + node, mask=is_node, other=0)
    root = positions + tl.load(row_start + request)
    # The root's own stay: storing them again would race with the loads.
    is_below = (node > 0) & (node < logits)
    for _ in tl.static_range(DIMENSIONS):
        tl.store(root + node, tl.load(root) + depth, mask=is_below)
        root += dimension_stride


def add_depths(staged: StagedTrees, cu_num_logits: Tensor, positions: Tensor) -> None:
    """Give the rows of trees that `stage_trees` has staged the positions of their roots + depth.

    Args:
        staged: trees of at least R requests, in the batch's order.
        cu_num_logits: [R+1] int32, as `stage_trees` was given.
        positions: [dimensions, rows] int64; the roots' are read, those of the other rows of trees
            are written.

    Raises:
        ValueError: an argument's dtype, device or shape does not fit; it is named.
    """
    requests, slots = cu_num_logits.shape[0] - 1, staged.tokens.shape[1]
    require(positions.dim() == 2, f"positions: expected two dimensions, got {positions.dim()}")
    require_layout(
        staged.tokens.device,
        cu_num_logits=(cu_num_logits, torch.int32, (1,)),
        positions=(positions, torch.int64, (1, positions.shape[1])),
        staged=(staged.num_nodes, torch.int32, (requests,)),
    )
    _add_depths[(requests,)](
        cu_num_logits,
        staged.num_nodes,
        staged.row_start,
        staged.depths,
        positions,
        positions.shape[1],
        DIMENSIONS=positions.shape[0],
        SLOTS=slots,
        BLOCK=triton.next_power_of_2(slots),
        num_warps=1 if slots <= 32 else 4,
    )
