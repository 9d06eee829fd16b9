# SPDX-License-Identifier: Apache-2.0
"""Logits of a request's candidates: products with a few rows of the vocabulary-wide layer.

    out[r, b, i] = V[t[r, i]] . x[r, b]             or, with a:  V[t[r, i]] . (a n(x[r, b]))

for the C candidates t of each request and all its beams. A thread block reads some candidates'
rows once for all beams. A row's norm, n(x) = sqrt(K) x / (|x| + epsilon), is a factor of its
products, as in `draft_layers.py`, so that what is read need not be normed before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout, require_like
from vllm_redrafter.triton_kernels.draft_layers import DTYPES

COLUMNS = 16
"""Candidates per thread block: few, so that 128 are 8 blocks' to read."""

KEY_BYTES = 512
"""Of each row, per step of the loop: as much as `draft_layers.py` has of twice as many columns."""


@triton.jit
def _gather_dot(
    x,  # [R * BEAMS, K]
    x_stride,
    weight,  # [V, K]
    weight_stride,
    tokens,  # [R, COUNT] int32
    scale,  # [K]; read where NORMED
    out,  # [R * BEAMS, COUNT] fp32, written
    K,
    epsilon,  # of the norm; read where NORMED
    BEAMS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    NORMED: tl.constexpr,
):
    """COLUMNS candidates of one request, for all its beams."""
    request = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, ROWS)
    is_row = beam < BEAMS
    row = request * BEAMS + beam
    nth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = nth < COUNT
    token = tl.load(tokens + request * COUNT + nth, mask=is_column, other=0).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, K, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        of_row = x + row[:, None] * x_stride + key[None, :]
        is_left = is_row[:, None] & (key < K)[None, :]
        left = tl.load(of_row, mask=is_left, other=0.0)
        right = tl.load(
            weight + token[None, :] * weight_stride + key[:, None],
            mask=(key < K)[:, None] & is_column[None, :],
            other=0,
        )
        if NORMED:
            again = left
            if ROWS == 16:
                # See `add_product` in draft_layers.py.
                again = tl.load(of_row, mask=is_left, other=0.0, eviction_policy="evict_last")
            wide = again.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            a = tl.load(scale + key, mask=key < K, other=0.0).to(tl.float32)
            left = (left.to(tl.float32) * a[None, :]).to(left.dtype)
        total = tl.dot(left, right, total, input_precision="ieee")
    if NORMED:
        total *= (tl.sqrt_rn(K.to(tl.float32)) / (tl.sqrt(squares) + epsilon))[:, None]
    at = row[:, None] * COUNT + nth[None, :]
    tl.store(out + at, total, mask=is_row[:, None] & is_column[None, :])


def gather_dot(
    x: Tensor, weight: Tensor, tokens: Tensor, scale: Tensor | None = None, epsilon: float = 0.0
) -> Tensor:
    """The logits of each request's candidates.

    Args:
        x: [R * beams, K] bf16, fp16 or fp32, at most 64 beams per request.
        weight: [V, K], the vocabulary-wide layer's, of x's dtype.
        tokens: [R, C] int32, contiguous, rows of it.
        scale: [K], a; None where x is multiplied as it is.
        epsilon: of the norm, where there is a scale.

    Returns:
        [R * beams, C] float32.
    """
    require(x.dtype in DTYPES, f"x: bf16, fp16 or fp32 expected, got {x.dtype}")
    require(
        tokens.dim() == 2 and len(x) % len(tokens) == 0,
        f"tokens: {list(tokens.shape)} does not fit {len(x)} rows",
    )
    (rows, keys), (requests, count) = x.shape, tokens.shape
    beams = rows // requests
    require_layout(x.device, tokens=(tokens, torch.int32, (requests, count)))
    require(beams <= 64, "x: at most 64 beams per request are supported")
    given: dict[str, tuple[Tensor, tuple[int, ...]]]
    given = {"x": (x, (rows, keys)), "weight": (weight, (len(weight), keys))}
    if scale is not None:
        given["scale"] = scale, (keys,)
    require_like(x, **given)
    out = torch.empty(rows, count, dtype=torch.float32, device=x.device)
    _gather_dot[(requests, triton.cdiv(count, COLUMNS))](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        tokens,
        scale if scale is not None else x,
        out,
        keys,
        epsilon,
        BEAMS=beams,
        COUNT=count,
        ROWS=max(16, triton.next_power_of_2(beams)),
        COLUMNS=COLUMNS,
        KEYS=KEY_BYTES // x.element_size(),
        STAGES=4 if beams <= 16 else 3,
        NORMED=scale is not None,
        num_warps=4,
    )
    return out
