# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk on the device: the path of a tree that the target itself sampled.

A node matches if it carries the token that the target sampled at its parent; it is accepted if it
and all its ancestors match, which with bit sets is one comparison per word:

    accepted(j)  <=>  ancestors(j) & ~matching = 0        (the root always matches)

Siblings carry different tokens, so the accepted nodes are one path, one node per depth, and the
deepest one has the largest index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import MAX_NODES
from vllm_redrafter.triton_kernels.checks import (
    require,
    require_integers,
    require_last_dim_contiguous,
    require_same_device,
)


@triton.jit
def _accept_path(
    tokens,  # [R, T] int32
    parents,  # [R, T] int32
    depths,  # [R, T] int32
    ancestors,  # [R, T, WORDS] int32 bit sets
    num_nodes,  # [R] int32
    sampled,  # [rows] int32 or int64
    row_start,  # [R] int32
    output_tokens,  # [R, OUTPUT_SLOTS] int32, written
    num_sampled,  # [R] int32, written
    path,  # [R, PATH_SLOTS] int32, written
    last_row,  # [R] int32, written
    stride_tree,
    stride_ancestors_request,
    stride_ancestors_node,
    stride_output,
    stride_path,
    OUTPUT_SLOTS: tl.constexpr,
    PATH_SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0)
    nodes = tl.load(num_nodes + request)
    first_row = tl.load(row_start + request)
    node = tl.arange(0, BLOCK_SLOTS)
    is_node = node < nodes
    at = request * stride_tree + node
    parent = tl.load(parents + at, mask=is_node, other=0)
    token = tl.load(tokens + at, mask=is_node, other=-1)
    drawn_at_parent = tl.load(sampled + first_row + parent, mask=is_node, other=-2)
    matches = is_node & ((token == drawn_at_parent) | (node == 0))

    missing = tl.zeros([BLOCK_SLOTS], dtype=tl.int32)
    for word in tl.static_range(WORDS):
        bit = tl.full([BLOCK_SLOTS], 1, dtype=tl.int32) << (node % 32)
        # Bits of one word are distinct, so their sum is their union.
        matching = tl.sum(tl.where(matches & (node // 32 == word), bit, 0), axis=0)
        own_at = request * stride_ancestors_request + node * stride_ancestors_node + word
        own = tl.load(ancestors + own_at, mask=is_node, other=0)
        missing = missing | (own & ~matching)
    accepted = is_node & (missing == 0)

    depth = tl.load(depths + at, mask=is_node, other=0)
    drawn = tl.load(sampled + first_row + node, mask=accepted, other=-1)
    tl.store(output_tokens + request * stride_output + depth, drawn.to(tl.int32), mask=accepted)
    tl.store(path + request * stride_path + depth, node, mask=accepted)
    count = tl.sum(accepted.to(tl.int32), axis=0)
    after = node >= count
    tl.store(output_tokens + request * stride_output + node, -1, mask=after & (node < OUTPUT_SLOTS))
    tl.store(path + request * stride_path + node, -1, mask=after & (node < PATH_SLOTS))
    tl.store(num_sampled + request, count)
    tl.store(last_row + request, first_row + tl.max(tl.where(accepted, node, 0), axis=0))


def accept_path(
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    sampled: Tensor,
    row_start: Tensor,
    output_tokens: Tensor,
    num_sampled: Tensor,
    path: Tensor,
    last_row: Tensor,
) -> None:
    """Walk every request's tree along the tokens that the target sampled.

    Args:
        tokens, parents, depths: [R, T] int32, see TokenTree; T at most 128.
        ancestors: [R, T, words] int32 bit sets, self included.
        num_nodes: [R] int32, between 1 and T.
        sampled: [rows] int32 or int64, the target's token at each node; request r's nodes are
            rows row_start[r] and following.
        row_start: [R] int32.
        output_tokens: [>= R, >= T] int32, receives the accepted tokens and the extra one, then -1
            up to the row's end.
        num_sampled: [>= R] int32, receives their number, 1 to T.
        path: [>= R, >= T] int32, receives the nodes walked, root first, then likewise -1.
        last_row: [>= R] int32, receives the row of the last accepted node.

    Raises:
        ValueError: an argument's dtype, device or shape does not fit; it is named.
    """
    require_integers(
        torch.int32,
        tokens=tokens,
        parents=parents,
        depths=depths,
        ancestors=ancestors,
        num_nodes=num_nodes,
        row_start=row_start,
        output_tokens=output_tokens,
        num_sampled=num_sampled,
        path=path,
        last_row=last_row,
    )
    require(
        sampled.dtype in (torch.int32, torch.int64) and sampled.dim() == 1,
        f"sampled: expected [rows] int32 or int64, got {list(sampled.shape)} {sampled.dtype}",
    )
    require_last_dim_contiguous(sampled=sampled)
    requests, slots = num_nodes.shape[0], tokens.shape[1]
    require(slots <= MAX_NODES, f"tokens: at most {MAX_NODES} nodes, got {slots} slots")
    for name, tensor in {
        "tokens": tokens,
        "row_start": row_start,
        "num_sampled": num_sampled,
        "last_row": last_row,
    }.items():
        require(
            tensor.shape[0] >= requests,
            f"{name}: {tensor.shape[0]} entries are too few for num_nodes' {requests} requests",
        )
    for name, tensor in {"parents": parents, "depths": depths}.items():
        require(
            tensor.shape == tokens.shape and tensor.stride(0) == tokens.stride(0),
            f"{name}: must have tokens' shape and strides, got {list(tensor.shape)}",
        )
    for name, tensor in {"output_tokens": output_tokens, "path": path}.items():
        require(
            tensor.shape[0] >= requests and tensor.shape[1] >= slots,
            f"{name}: {list(tensor.shape)} has no room for [{requests}, {slots}]",
        )
    words = triton.cdiv(slots, 32)
    require(
        ancestors.dim() == 3
        and ancestors.shape[0] >= requests
        and ancestors.shape[1] >= slots
        and ancestors.shape[2] >= words,
        f"ancestors: {list(ancestors.shape)} has no room for {requests} trees of {slots} nodes",
    )
    require_same_device(
        tokens,
        parents=parents,
        depths=depths,
        ancestors=ancestors,
        num_nodes=num_nodes,
        sampled=sampled,
        row_start=row_start,
        output_tokens=output_tokens,
        num_sampled=num_sampled,
        path=path,
        last_row=last_row,
    )
    block_slots = triton.next_power_of_2(max(output_tokens.shape[1], path.shape[1]))
    _accept_path[(requests,)](
        tokens,
        parents,
        depths,
        ancestors,
        num_nodes,
        sampled,
        row_start,
        output_tokens,
        num_sampled,
        path,
        last_row,
        tokens.stride(0),
        ancestors.stride(0),
        ancestors.stride(1),
        output_tokens.stride(0),
        path.stride(0),
        OUTPUT_SLOTS=output_tokens.shape[1],
        PATH_SLOTS=path.shape[1],
        BLOCK_SLOTS=block_slots,
        WORDS=words,
        num_warps=1 if block_slots <= 32 else 4,
    )
