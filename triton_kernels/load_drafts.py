# SPDX-License-Identifier: Apache-2.0
"""What a draft starts from, gathered for the requests of a batch into memory that graphs read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout

COLUMNS = 1024
"""Of a hidden state, that a program copies."""


@triton.jit(do_not_specialize=["num_requests", "num_verified", "no_slot"])
def _load_drafts(
    idx_mapping,  # [R] int64
    walked_rows,  # [R] int64; read where trees were verified
    query_start_loc,  # [R+1] int32; read elsewhere
    num_nodes,  # [R] int32
    last_sampled,  # [slots] int64
    temperature,  # [slots] fp32
    out_hidden,  # [R, STRIDE], SIZE of it written
    out_roots,  # [R] int64, written
    out_slots,  # [R] int64, written
    out_num_verified,  # [R] int32, written
    out_temperatures,  # [R] fp32, written
    state,  # [rows, SIZE]
    num_requests,
    num_verified,
    no_slot,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One request, and a part of its hidden state; requests from `num_requests` on are padding."""
    request = tl.program_id(0)
    if request >= num_requests:
        tl.store(out_slots + request, no_slot)
        tl.store(out_num_verified + request, 0)
        return
    slot = tl.load(idx_mapping + request)
    if num_verified > 0:
        nodes = tl.load(num_nodes + request)
        row = tl.load(walked_rows + request)
    else:
        nodes = 0
        row = tl.load(query_start_loc + request + 1).to(tl.int64) - 1
    if tl.program_id(1) == 0:
        tl.store(out_slots + request, slot)
        tl.store(out_num_verified + request, nodes)
        tl.store(out_roots + request, tl.load(last_sampled + slot))
        tl.store(out_temperatures + request, tl.load(temperature + slot))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE
    part = tl.load(state + row * SIZE + column, mask=is_column)
    tl.store(out_hidden + request.to(tl.int64) * STRIDE + column, part, mask=is_column)


class StepEnd(NamedTuple):
    """A batch of R requests after sampling.

    Attributes:
        idx_mapping: [R] int64, each request's slot.
        walked_rows: [>= R] int64, the rows of the last accepted nodes, where trees were verified.
        query_start_loc: [>= R+1] int32; elsewhere a request's last row counts.
        num_nodes: [>= R] int32, nodes verified of each tree, the root counted.
        last_sampled: [slots] int64, each slot's next root.
        temperature: [slots] fp32.
    """

    idx_mapping: Tensor
    walked_rows: Tensor
    query_start_loc: Tensor
    num_nodes: Tensor
    last_sampled: Tensor
    temperature: Tensor


class DraftInputs(NamedTuple):
    """Of R requests, in the batch's order.

    Attributes:
        hidden: [R, n H], the hidden states of n layers.
        roots: [R] int64.
        slots: [R] int64; of padding, R.
        num_verified: [R] int32, nodes verified, roots included; 0: not verified.
        temperatures: [R] fp32.
    """

    hidden: Tensor
    roots: Tensor
    slots: Tensor
    num_verified: Tensor
    temperatures: Tensor


def load_drafts(
    step: StepEnd, states: Sequence[Tensor], out: DraftInputs, verified: int, padded: int
) -> None:
    """Load the batch, and padding up to `padded` requests, in one launch for each of the states.

    Args:
        states: [rows, H] each of the step, as wide as `out.hidden` together; at least one.
        out: written.
        verified: how many requests' trees were walked: all or none.
    """
    requests, int64, int32 = step.idx_mapping.shape[0], torch.int64, torch.int32
    size, width = states[0].shape[1], out.hidden.shape[1]
    require(
        verified in (0, requests) and size * len(states) == width,
        f"states: {len(states)} of {size} for {width}, of {verified} requests of {requests}",
    )
    require_layout(
        out.hidden.device,
        idx_mapping=(step.idx_mapping, int64, (requests,)),
        walked_rows=(step.walked_rows, int64, (requests,)),
        query_start_loc=(step.query_start_loc, int32, (requests + 1,)),
        num_nodes=(step.num_nodes, int32, (requests,)),
        last_sampled=(step.last_sampled, int64, (1,)),
        temperature=(step.temperature, torch.float32, (1,)),
        hidden=(out.hidden, out.hidden.dtype, (max(requests, padded), width)),
        roots=(out.roots, int64, (padded,)),
        slots=(out.slots, int64, (padded,)),
        num_verified=(out.num_verified, int32, (padded,)),
        temperatures=(out.temperatures, torch.float32, (padded,)),
    )
    for index, state in enumerate(states):
        require_layout(out.hidden.device, states=(state, out.hidden.dtype, (1, size)))
        _load_drafts[(padded, triton.cdiv(size, COLUMNS))](
            *step,
            *out._replace(hidden=out.hidden[:, index * size :]),
            state,
            requests,
            verified,
            out.slots.shape[0],
            STRIDE=width,
            SIZE=size,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
