"""What the onepass head's small state changes of what the root told, for few rows: one launch.

    [p ; c] = D u + b;    out = sigmoid(p) g + c

with g the same for all beams of a request; see `heads/onepass.py`. As in `gated_layer.py`, lane 2i
of a thread block's products is p's column i, lane 2i + 1 c's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require
from vllm_redrafter.triton_kernels.draft_layers import KEY_BYTES, MAX_ROWS, add_product
from vllm_redrafter.triton_kernels.gated_layer import check_like

COLUMNS = 16
"""Of the output, per thread block; there are two rows of D for each."""


@triton.jit(do_not_specialize=["M"])
def _correct(
    u,  # [M, S]
    u_stride,
    weight,  # [2 H, S]
    weight_stride,
    bias,  # [2 H]
    told,  # [M / GROUP, H]
    told_stride,
    out,  # [M, H], written
    out_stride,
    M,
    H,
    S,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """COLUMNS columns of all rows."""
    row = tl.arange(0, ROWS).to(tl.int64)
    is_row = row < M
    first = tl.program_id(0) * COLUMNS
    lane = tl.arange(0, 2 * COLUMNS)
    is_lane = first + lane // 2 < H
    weight_row = (first + lane // 2 + (lane % 2) * H).to(tl.int64)
    total = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    total = add_product(
        total, u, u_stride, row, is_row, weight, weight_stride, weight_row, is_lane, S, KEYS
    )
    total += tl.load(bias + weight_row, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    kept, change = tl.split(tl.reshape(total, [ROWS, COLUMNS, 2]))
    column = (first + tl.arange(0, COLUMNS)).to(tl.int64)
    is_out = is_row[:, None] & (column < H)[None, :]
    at = (row // GROUP)[:, None] * told_stride + column[None, :]
    known = tl.load(told + at, mask=is_out, other=0.0).to(tl.float32)
    corrected = known / (1.0 + tl.exp(-kept)) + change
    at = row[:, None] * out_stride + column[None, :]
    tl.store(out + at, corrected.to(out.dtype.element_ty), mask=is_out)


def correct(state: Tensor, weight: Tensor, bias: Tensor, told: Tensor, out: Tensor) -> Tensor:
    """sigmoid(p) g + c, for at most 64 rows: see this module.

    Args:
        state: [M, S], u.
        weight: [2 H, S], D.
        bias: [2 H], b.
        told: [M / group, H], g: each row is that of `group` states in turn.
        out: [M, H], written; bf16, fp16 or fp32, as all that is read, and not among the inputs.

    Returns:
        out.

    Raises:
        ValueError: an argument's dtype, device, shape or stride does not fit; it is named.
    """
    rows, hidden = out.shape
    require(1 <= rows <= MAX_ROWS, f"out: 1 to {MAX_ROWS} rows are supported, got {rows}")
    small = state.shape[-1]
    given = {
        "state": (state, (rows, small)),
        "weight": (weight, (2 * hidden, small)),
        "bias": (bias, (2 * hidden,)),
        "told": (told, (len(told), hidden)),
    }
    check_like(out, given)
    require(rows % len(told) == 0, f"told: {len(told)} rows do not fit {rows} states")
    _correct[(triton.cdiv(hidden, COLUMNS),)](
        state,
        state.stride(0),
        weight,
        weight.stride(0),
        bias,
        told,
        told.stride(0),
        out,
        out.stride(0),
        rows,
        hidden,
        small,
        GROUP=rows // len(told),
        ROWS=max(16, triton.next_power_of_2(rows)),
        COLUMNS=COLUMNS,
        KEYS=KEY_BYTES // out.element_size(),
        num_warps=4,
        # Of 64 rows, four would be more than AMD's gfx942 has shared memory for.
        num_stages=4 if rows <= 32 else 3,
    )
    return out


def naive_correct(state: Tensor, weight: Tensor, bias: Tensor, told: Tensor) -> Tensor:
    """`correct` by torch, in float64: [M, H] float64."""
    kept, change = (state.double() @ weight.double().t() + bias.double()).chunk(2, dim=-1)
    return told.double().repeat_interleave(len(state) // len(told), dim=0) * kept.sigmoid() + change
