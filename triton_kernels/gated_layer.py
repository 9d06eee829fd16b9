# SPDX-License-Identifier: Apache-2.0
"""A gated cell, and a gated head's last norm, for few rows: one launch each.

    [g ; x] = W [n(e) ; n(s)] + b                       n(x) = sqrt(N) x / (|x| + epsilon)
    cell:  out = z s + (1 - z) SiLU(x),  z = sigmoid(g)
    norm:  out = a n(s)

See `heads/gated.py`. As in `draft_layers.py`, weights are read once, and a row's norm is a factor
of its product. A thread block makes the same columns of g and of x, which are different rows of W:
lane 2i of its products is g's column i, lane 2i + 1 x's.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require
from vllm_redrafter.triton_kernels.draft_layers import (
    KEY_BYTES,
    MAX_ROWS,
    add_product,
    check_like,
    check_rows,
)

NORM_KEYS = 2048
"""Of a row, per step of the norm's loops."""


@triton.jit(do_not_specialize=["M"])
def _gated_cell(
    e,  # [.., N]
    e_stride,
    e_rows,  # [M] int64; read where HAS_E_ROWS
    s,  # [.., N]
    s_stride,
    s_rows,  # [M] int32; read where HAS_S_ROWS
    weight,  # [2 N, 2 N]
    weight_stride,
    bias,  # [2 N]
    out,  # [M, N], written
    out_stride,
    M,
    N,
    epsilon,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_E_ROWS: tl.constexpr,
    HAS_S_ROWS: tl.constexpr,
):
    """COLUMNS columns of all rows."""
    row = tl.arange(0, ROWS)
    is_row = row < M
    e_row = tl.load(e_rows + row, mask=is_row, other=0) if HAS_E_ROWS else row.to(tl.int64)
    s_row = row.to(tl.int64)
    if HAS_S_ROWS:
        s_row = tl.load(s_rows + row, mask=is_row, other=0).to(tl.int64)
    first = tl.program_id(0) * COLUMNS
    lane = tl.arange(0, 2 * COLUMNS)
    is_lane = first + lane // 2 < N
    weight_row = (first + lane // 2 + (lane % 2) * N).to(tl.int64)
    of_lane = weight + weight_row * weight_stride
    nothing = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    of_e, of_s = e + e_row * e_stride, s + s_row * s_stride
    total = add_product(of_e, is_row, of_lane, is_lane, nothing, N, epsilon, KEYS, True)
    total += add_product(of_s, is_row, of_lane + N, is_lane, nothing, N, epsilon, KEYS, NORMED=True)
    total += tl.load(bias + weight_row, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    gate, candidate = tl.split(tl.reshape(total, [ROWS, COLUMNS, 2]))
    gate = 1.0 / (1.0 + tl.exp(-gate))
    candidate = candidate / (1.0 + tl.exp(-candidate))
    column = (first + tl.arange(0, COLUMNS)).to(tl.int64)
    is_out = is_row[:, None] & (column < N)[None, :]
    before = tl.load(s + s_row[:, None] * s_stride + column[None, :], mask=is_out, other=0.0)
    after = candidate + gate * (before.to(tl.float32) - candidate)
    at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out + at, after.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def _scale_normed(
    s,  # [M, H]
    s_stride,
    scale,  # [H]
    out,  # [M, H], written
    out_stride,
    H,
    epsilon,
    KEYS: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([KEYS], tl.float32)
    for start in range(0, H, KEYS):
        key = start + tl.arange(0, KEYS)
        x = tl.load(s + row * s_stride + key, mask=key < H, other=0.0).to(tl.float32)
        squares += x * x
    factor = tl.sqrt_rn(H.to(tl.float32)) / (tl.sqrt(tl.sum(squares, axis=0)) + epsilon)
    for start in range(0, H, KEYS):
        key = start + tl.arange(0, KEYS)
        x = tl.load(s + row * s_stride + key, mask=key < H, other=0.0).to(tl.float32)
        a = tl.load(scale + key, mask=key < H, other=0.0).to(tl.float32)
        scaled = a * (x * factor)
        tl.store(out + row * out_stride + key, scaled.to(out.dtype.element_ty), mask=key < H)


class Rows(NamedTuple):
    """What a cell reads.

    Attributes:
        x: [.., columns].
        rows: [M] int64 (of embeddings) or int32 (of states): which rows of x; None for the first
            M in order.
    """

    x: Tensor
    rows: Tensor | None = None


def gated_cell(
    embedded: Rows, state: Rows, weight: Tensor, bias: Tensor, out: Tensor, epsilon: float
) -> Tensor:
    """The states of at most 64 rows: see this module.

    Args:
        embedded: e [.., N], of the tokens; with `rows`, the embedding's table.
        state: s [.., N], that they go on from.
        weight: [2 N, 2 N], W.
        bias: [2 N], b.
        out: [M, N], written; bf16, fp16 or fp32, as all that is read. Not among the inputs: other
            thread blocks still read them.
        epsilon: of the norms.

    Returns:
        out.
    """
    rows, width = out.shape
    require(1 <= rows <= MAX_ROWS, f"out: 1 to {MAX_ROWS} rows are supported, got {rows}")
    shapes = {
        "embedded.x": (embedded.x, (len(embedded.x), width)),
        "state.x": (state.x, (len(state.x), width)),
        "weight": (weight, (2 * width, 2 * width)),
        "bias": (bias, (2 * width,)),
    }
    check_like(out, shapes)
    check_rows("embedded", *embedded, torch.int64, rows)
    check_rows("state", *state, torch.int32, rows)
    # Of a narrow state, 16 columns each would be too few thread blocks for a GPU.
    columns = 16 if width > 1024 else 8
    _gated_cell[(triton.cdiv(width, columns),)](
        embedded.x,
        embedded.x.stride(0),
        embedded.rows if embedded.rows is not None else out,
        state.x,
        state.x.stride(0),
        state.rows if state.rows is not None else out,
        weight,
        weight.stride(0),
        bias,
        out,
        out.stride(0),
        rows,
        width,
        epsilon,
        ROWS=max(16, triton.next_power_of_2(rows)),
        COLUMNS=columns,
        KEYS=KEY_BYTES // out.element_size(),
        HAS_E_ROWS=embedded.rows is not None,
        HAS_S_ROWS=state.rows is not None,
        # Sums of 64 rows are more than the registers of 4 warps hold, on sm_80 and sm_100.
        num_warps=4 if rows <= 32 else 8,
    )
    return out


def scale_normed(state: Tensor, scale: Tensor, out: Tensor, epsilon: float) -> Tensor:
    """a n(s): see this module.

    Args:
        state: [M, H], s.
        scale: [H], a.
        out: [M, H], written; bf16, fp16 or fp32, as all that is read, and not among the inputs.
        epsilon: of the norm.

    Returns:
        out.
    """
    rows, hidden = out.shape
    check_like(out, {"state": (state, (rows, hidden)), "scale": (scale, (hidden,))})
    _scale_normed[(rows,)](
        state,
        state.stride(0),
        scale,
        out,
        out.stride(0),
        hidden,
        epsilon,
        KEYS=min(NORM_KEYS, triton.next_power_of_2(hidden)),
        num_warps=4,
    )
    return out
