# SPDX-License-Identifier: Apache-2.0
"""The trees of one step, from the drafter's table to the batch's order.

The drafter leaves each request's tree in a table by request slot; a step verifies the requests of
a batch, each with as many of its tree's first nodes as the scheduler had room for. For request r
of the batch, in slot s, with L logits rows (the root and the scheduled draft tokens):

    num_nodes = min(nodes of table[s], L),    context = sequence length - query length

and its rows get the positions n + depth, n the root's linear position; rows beyond the tree, which
hold padding tokens, get the root's. Where rows have several positions (M-RoPE), vLLM gives a
decoding row n + delta in every dimension, by the request's images: a node's are its root's + depth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.build_tree import TreeBuffers
from vllm_redrafter.triton_kernels.checks import require, require_layout


# One kernel for any number of requests: Triton would compile others for 1 and multiples of 16, and
# a server would meet them, and wait for them, while it serves.
@triton.jit(do_not_specialize=["num_requests"])
def _stage_trees(
    idx_mapping,  # [R] int64
    query_start_loc,  # [R+1] int32
    cu_num_logits,  # [R+1] int32
    seq_lens,  # [R] int32
    table_tokens,  # [request slots, SLOTS] int32
    table_parents,  # [request slots, SLOTS] int32
    table_depths,  # [request slots, SLOTS] int32
    table_ancestors,  # [request slots, SLOTS, WORDS] int32
    table_num_nodes,  # [request slots] int32
    tokens,  # [R, SLOTS] int32, written
    parents,  # [R, SLOTS] int32, written
    depths,  # [R, SLOTS] int32, written
    ancestors,  # [R, SLOTS, WORDS] int32, written
    num_nodes,  # [R] int32, written
    context_lens,  # [R] int32, written
    row_start,  # [R] int32, written
    positions,  # [rows] int64, changed
    num_requests,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """One request of the batch; those from `num_requests` on are padding, without rows."""
    request = tl.program_id(0)
    if request >= num_requests:
        tl.store(num_nodes + request, 0)
        tl.store(context_lens + request, 0)
        return
    slot = tl.load(idx_mapping + request)
    logits = tl.load(cu_num_logits + request + 1) - tl.load(cu_num_logits + request)
    query_start = tl.load(query_start_loc + request)
    query_end = tl.load(query_start_loc + request + 1)
    nodes = tl.minimum(tl.load(table_num_nodes + slot), logits)
    first_row = query_end - logits
    tl.store(num_nodes + request, nodes)
    tl.store(row_start + request, first_row)
    tl.store(context_lens + request, tl.load(seq_lens + request) - (query_end - query_start))

    node = tl.arange(0, BLOCK)
    is_slot = node < SLOTS
    source, destination = slot * SLOTS + node, request * SLOTS + node
    token = tl.load(table_tokens + source, mask=is_slot)
    tl.store(tokens + destination, token, mask=is_slot)
    parent = tl.load(table_parents + source, mask=is_slot)
    tl.store(parents + destination, parent, mask=is_slot)
    depth = tl.load(table_depths + source, mask=is_slot, other=0)
    tl.store(depths + destination, depth, mask=is_slot)
    word = tl.arange(0, BLOCK_WORDS)
    is_word = word < SLOTS * WORDS
    words = tl.load(table_ancestors + slot * SLOTS * WORDS + word, mask=is_word)
    tl.store(ancestors + request * SLOTS * WORDS + word, words, mask=is_word)

    root_position = tl.load(positions + first_row)
    position = root_position + tl.where(node < nodes, depth, 0)
    # The root's position is itself: storing it again would race with the load above.
    tl.store(positions + first_row + node, position, mask=(node > 0) & (node < logits))


class StagedTrees(TreeBuffers):
    """The batch's trees, and where their rows are; allocated once, fixed in shape.

    Attributes:
        context_lens: [R] int32, n: tokens in the KV cache before the query.
        row_start: [R] int32, the row of the root among the step's rows.
    """

    def __init__(self, max_requests: int, max_nodes: int, device: torch.device | str) -> None:
        super().__init__(max_requests, max_nodes, device)
        self.context_lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self.row_start = torch.zeros(max_requests, dtype=torch.int32, device=device)


def stage_trees(
    table: TreeBuffers,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    out: StagedTrees,
    num_padded: int,
) -> None:
    """Gather the batch's trees; give their rows tree positions.

    Args:
        table: the drafter's trees by request slot.
        idx_mapping: [R] int64, the slot of each request.
        query_start_loc: [>= R+1] int32, the step's rows by request.
        cu_num_logits: [R+1] int32, likewise the rows that logits are computed for: each
            request's last ones, between 1 and K+1.
        seq_lens: [>= R] int32, context and query together.
        positions: [rows] int64, linear; changed in place to n + depth.
        out: as many nodes as `table`, and at least `num_padded` requests.
        num_padded: requests to write, at least R; those beyond R become empty.
    """
    requests, slots, int32 = idx_mapping.shape[0], out.tokens.shape[1], torch.int32
    require(
        table.tokens.shape[1] == slots,
        f"out: trees of {slots} nodes cannot hold the table's of {table.tokens.shape[1]}",
    )
    require(num_padded >= requests, f"num_padded: {num_padded} is too few for {requests} requests")
    require_layout(
        table.tokens.device,
        idx_mapping=(idx_mapping, torch.int64, (1,)),
        query_start_loc=(query_start_loc, int32, (requests + 1,)),
        cu_num_logits=(cu_num_logits, int32, (requests + 1,)),
        seq_lens=(seq_lens, int32, (requests,)),
        positions=(positions, torch.int64, (1,)),
        out=(out.num_nodes, int32, (num_padded,)),
    )
    words = out.ancestors.shape[2]
    _stage_trees[(num_padded,)](
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        seq_lens,
        *table.fields,
        *out.fields,
        out.context_lens,
        out.row_start,
        positions,
        requests,
        SLOTS=slots,
        WORDS=words,
        BLOCK=triton.next_power_of_2(slots),
        BLOCK_WORDS=triton.next_power_of_2(slots * words),
        num_warps=1 if slots <= 32 else 4,
    )


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
