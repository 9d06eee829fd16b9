# SPDX-License-Identifier: Apache-2.0
"""Which drafted nodes of a batch are verified, and where each request's rows begin: in one launch.

A node's survival is the product of the confidences up to it, so it falls along a request, and the B
nodes of the highest survival are each request's first ones. Positive floats are ordered as their
bits are; the upper 17 below the sign tell 0.2 % apart. Of nodes that these take for equal, the
first requests' are admitted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout
from vllm_redrafter.triton_kernels.ordered_keys import nth_largest


@triton.jit(do_not_specialize=["num_requests", "budget", "num_tokens", "num_starts"])
def _admit_nodes(
    confidences,  # [slots, STRIDE] fp32, in the columns from 1 on
    idx_mapping,  # [R] int64
    scheduled,  # [2, R] int32: nodes that can be verified, and other tokens
    cu_num_logits,  # [R+1] int32, written
    query_start_loc,  # [num_starts] int32, written
    num_requests,
    budget,
    num_tokens,
    num_starts,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """All requests at once."""
    request, node = tl.arange(0, BLOCK), tl.arange(0, BLOCK_NODES)
    is_request = request < num_requests
    slot = tl.load(idx_mapping + request, mask=is_request, other=0)
    most = tl.load(scheduled + request, mask=is_request, other=0)
    others = tl.load(scheduled + num_requests + request, mask=is_request, other=0)
    is_node = node[None, :] < most[:, None]
    at = slot[:, None] * STRIDE + 1 + node[None, :]
    survival = tl.cumprod(tl.load(confidences + at, mask=is_node, other=0.0), axis=1)
    bits = tl.where(is_node, survival.to(tl.int32, bitcast=True) >> 14, -1)
    least = nth_largest(tl.reshape(bits, [BLOCK * BLOCK_NODES]), budget, 17)
    above = tl.sum((bits > least).to(tl.int32), axis=1)
    equal = tl.sum((bits == least).to(tl.int32), axis=1)
    left = budget - tl.sum(above, axis=0) - (tl.cumsum(equal, axis=0) - equal)
    nodes = above + tl.minimum(tl.maximum(left, 0), equal)
    tl.store(cu_num_logits + request + 1, tl.cumsum(nodes + 1, axis=0), mask=is_request)
    ends = tl.where(is_request, tl.cumsum(nodes + others, axis=0), num_tokens)
    tl.store(query_start_loc + request + 1, ends, mask=request + 1 < num_starts)
    tl.store(cu_num_logits, 0)
    tl.store(query_start_loc, 0)


def admit_nodes(
    confidences: Tensor,
    idx_mapping: Tensor,
    scheduled: Tensor,
    budget: int,
    num_tokens: int,
    cu_num_logits: Tensor,
    query_start_loc: Tensor,
) -> None:
    """Admit `budget` nodes of R requests.

    Args:
        confidences: [slots, K+1] fp32 from 0 to 1, each node's given that its predecessor in the
            order is accepted; the root's are not read.
        idx_mapping: [R] int64, each request's slot.
        scheduled: [2, R] int32, how many first nodes can be verified, and the other tokens.
        budget: at most the sum of the former.
        num_tokens: of the step.
        cu_num_logits: [R+1 or more] int32, receives the starts of admitted nodes with their roots.
        query_start_loc: [all requests + 1] int32, receives the starts of nodes and other tokens;
            `num_tokens` behind the batch.
    """
    requests, starts = idx_mapping.shape[0], query_start_loc.shape[0]
    require(requests < starts, f"query_start_loc: {starts} starts for {requests} requests")
    require_layout(
        confidences.device,
        confidences=(confidences, torch.float32, (1, confidences.shape[1])),
        idx_mapping=(idx_mapping, torch.int64, (requests,)),
        scheduled=(scheduled, torch.int32, (2, requests)),
        cu_num_logits=(cu_num_logits, torch.int32, (requests + 1,)),
        query_start_loc=(query_start_loc, torch.int32, (requests + 1,)),
    )
    # One size for batches of any: Triton would compile others while the engine serves.
    block, block_nodes = (triton.next_power_of_2(n - 1) for n in (starts, confidences.shape[1]))
    _admit_nodes[(1,)](
        confidences,
        idx_mapping,
        scheduled,
        cu_num_logits,
        query_start_loc,
        requests,
        budget,
        num_tokens,
        starts,
        STRIDE=confidences.shape[1],
        BLOCK=block,
        BLOCK_NODES=block_nodes,
        num_warps=min(32, max(4, block * block_nodes // 512)),
    )
