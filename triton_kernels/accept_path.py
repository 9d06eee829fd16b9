# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk on the device: the path of a tree that the target itself sampled.

A node matches if it carries the token that the target sampled at its parent; it is accepted if it
and all its ancestors match, which with bit sets is one comparison per word:

    accepted(j)  <=>  ancestors(j) & ~matching = 0        (the root always matches)

Siblings carry different tokens, so the accepted nodes are one path, one node per depth, and the
deepest one has the largest index. What the rest of the step asks of the walk is written on the way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.build_tree import TreeBuffers
from vllm_redrafter.triton_kernels.checks import require, require_layout


@triton.jit(do_not_specialize=["first_request", "first_row"])
def _accept_path(
    tokens,  # [R, SLOTS] int32
    parents,  # [R, SLOTS] int32
    depths,  # [R, SLOTS] int32
    ancestors,  # [R, SLOTS, WORDS] int32 bit sets
    num_nodes,  # [R] int32
    sampled,  # [rows from `first_row` on] int64
    cu_num_logits,  # [R+1] int32
    logits_indices,  # [rows] int64
    seq_lens,  # [R] int32
    idx_mapping,  # [R] int64
    prefill_len,  # [request slots] int32
    output_tokens,  # [R, SLOTS] int32, written
    num_sampled,  # [R] int32, written
    num_rejected,  # [R] int32, written
    path,  # [R, SLOTS] int32, written
    last_rows,  # [R] int64, written
    counts,  # [3] int64, added to
    first_request,
    first_row,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One request."""
    request = first_request + tl.program_id(0)
    nodes = tl.load(num_nodes + request)
    root_row = tl.load(cu_num_logits + request)
    logits = tl.load(cu_num_logits + request + 1) - root_row
    own_sampled = sampled + root_row - first_row
    node = tl.arange(0, BLOCK)
    is_node = node < nodes
    at = request * SLOTS + node
    parent = tl.load(parents + at, mask=is_node, other=0)
    token = tl.load(tokens + at, mask=is_node, other=-1)
    drawn_at_parent = tl.load(own_sampled + parent, mask=is_node, other=-2)
    matches = is_node & ((token == drawn_at_parent) | (node == 0))

    missing = tl.zeros([BLOCK], dtype=tl.int32)
    for word in tl.static_range(WORDS):
        bit = tl.full([BLOCK], 1, dtype=tl.int32) << (node % 32)
        # Bits of one word are distinct, so their sum is their union.
        matching = tl.sum(tl.where(matches & (node // 32 == word), bit, 0), axis=0)
        own = tl.load(ancestors + at * WORDS + word, mask=is_node, other=0)
        missing = missing | (own & ~matching)
    accepted = is_node & (missing == 0)

    depth = tl.load(depths + at, mask=is_node, other=0)
    drawn = tl.load(own_sampled + node, mask=accepted, other=-1)
    tl.store(output_tokens + request * SLOTS + depth, drawn.to(tl.int32), mask=accepted)
    tl.store(path + request * SLOTS + depth, node, mask=accepted)
    count = tl.sum(accepted.to(tl.int32), axis=0)
    after = (node >= count) & (node < SLOTS)
    tl.store(output_tokens + at, -1, mask=after)
    tl.store(path + at, -1, mask=after)
    last_node = tl.max(tl.where(accepted, node, 0), axis=0)
    tl.store(last_rows + request, tl.load(logits_indices + root_row + last_node))
    # A prompt that goes on outputs nothing, as vLLM has it.
    to_be_read = tl.load(prefill_len + tl.load(idx_mapping + request))
    goes_on = tl.load(seq_lens + request) < to_be_read
    tl.store(num_sampled + request, tl.where(goes_on, 0, count))
    tl.store(num_rejected + request, tl.where(goes_on, 0, logits - count))
    if nodes > 1:
        tl.atomic_add(counts, 1)
        tl.atomic_add(counts + 1, nodes.to(tl.int64) - 1)
        tl.atomic_add(counts + 2, count.to(tl.int64))


class SampledRows(NamedTuple):
    """A step's rows of logits, of R requests.

    Attributes:
        cu_num_logits: [R+1] int32, each request's first row.
        logits_indices: [rows] int64, the step's row that each is of.
        seq_lens, idx_mapping: [R] int32, the length of each text with the step's rows, and [R]
            int64, its slot.
        prefill_len: [slots] int32, the tokens to be read before one is output.
    """

    cu_num_logits: Tensor
    logits_indices: Tensor
    seq_lens: Tensor
    idx_mapping: Tensor
    prefill_len: Tensor


class AcceptedPaths(NamedTuple):
    """What a walk writes, for R requests and trees of T nodes with the root.

    Attributes:
        tokens: [R, T] int32, the accepted tokens and the extra one, then -1 up to the row's end.
        num_sampled, num_rejected: [R] int32, how many these are, and how many of the request's
            rows of logits besides; 0 where a prompt goes on.
        path: [R, T] int32, the nodes walked, root first, then likewise -1.
        last_rows: [R] int64, the step's row of the last accepted node.
        counts: [3] int64, added to: trees of more than the root, nodes below their roots, and the
            tokens that these requests output.
    """

    tokens: Tensor
    num_sampled: Tensor
    num_rejected: Tensor
    path: Tensor
    last_rows: Tensor
    counts: Tensor


def accept_path(
    trees: TreeBuffers,
    rows: SampledRows,
    sampled: Tensor,
    out: AcceptedPaths,
    requests: slice,
    first_row: int = 0,
) -> None:
    """Walk the requests' trees along the tokens that the target sampled.

    Args:
        trees: in the batch's order, each of at least its root.
        rows: of the whole batch; a request's are as many as its nodes, or more.
        sampled: [rows] int64, the target's token at each node, from row `first_row` on.
        out: written for these requests.
        requests: of the batch.
        first_row: of the batch's rows of logits.
    """
    slots, stop, int32 = trees.tokens.shape[1], requests.stop, torch.int32
    require(trees.num_nodes.shape[0] >= stop, f"trees: of fewer than {stop} requests")
    require_layout(
        trees.tokens.device,
        sampled=(sampled, torch.int64, (1,)),
        cu_num_logits=(rows.cu_num_logits, int32, (stop + 1,)),
        logits_indices=(rows.logits_indices, torch.int64, (first_row + sampled.shape[0],)),
        seq_lens=(rows.seq_lens, int32, (stop,)),
        idx_mapping=(rows.idx_mapping, torch.int64, (stop,)),
        prefill_len=(rows.prefill_len, int32, (1,)),
        tokens=(out.tokens, int32, (stop, slots)),
        num_sampled=(out.num_sampled, int32, (stop,)),
        num_rejected=(out.num_rejected, int32, (stop,)),
        path=(out.path, int32, (stop, slots)),
        last_rows=(out.last_rows, torch.int64, (stop,)),
        counts=(out.counts, torch.int64, (3,)),
    )
    _accept_path[(stop - requests.start,)](
        *trees.fields,
        sampled,
        *rows,
        *out,
        requests.start,
        first_row,
        SLOTS=slots,
        BLOCK=triton.next_power_of_2(slots),
        WORDS=trees.ancestors.shape[2],
        num_warps=1 if slots <= 32 else 4,
    )
