# SPDX-License-Identifier: Apache-2.0
"""The cell of a published speculator, behind its projection: one launch.

    u = p + alpha z, of an LSTM [f ; i ; o ; g]      n(x) = x / sqrt(mean(x^2) + epsilon)
    MLP:   s = GELU(a n(u) + b)
    LSTM:  c = sigmoid(f) c' + sigmoid(i) GELU(a n(g) + b),  s = sigmoid(o) GELU(a' n(c) + b')

See `heads/speculators.py`. There is a product p for each state above, however many beams go on from
it. A thread block has a row in registers.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require
from vllm_redrafter.triton_kernels.draft_layers import check_like, check_rows
from vllm_redrafter.triton_kernels.gated_layer import Rows

WIDEST = 8192
"""Of D: what registers hold of an LSTM's row."""


@triton.jit
def _read(row, key, is_key):
    """[KEYS] fp32, 0 behind the row's end."""
    return tl.load(row + key, mask=is_key, other=0.0).to(tl.float32)


@triton.jit
def _gelu_of_normed(x, weight, bias, key, is_key, D, epsilon):
    """GELU(a n(x) + b) of a row x [KEYS] fp32; what stands behind its end stays 0."""
    a, b = _read(weight, key, is_key), _read(bias, key, is_key)
    x = a * (x * tl.rsqrt(tl.sum(x * x, axis=0) / D + epsilon)) + b
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _speculator_cell(
    table,  # [V, D]
    table_stride,
    tokens,  # [M] int64
    projected,  # [.., D], or [.., 4 D] of an LSTM
    projected_stride,
    parents,  # [M] int32; read where HAS_PARENTS
    state,  # [.., 2 D]; read of an LSTM where HAS_PARENTS
    state_stride,
    weight,  # [D]
    bias,  # [D]
    state_weight,  # [D]; read of an LSTM
    state_bias,  # [D]; likewise
    out,  # [M, D], or [M, 2 D] of an LSTM, written
    out_stride,
    D,
    alpha,
    epsilon,
    KEYS: tl.constexpr,
    LSTM: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    """A row."""
    row = tl.program_id(0).to(tl.int64)
    above = tl.load(parents + row).to(tl.int64) if HAS_PARENTS else row
    key = tl.arange(0, KEYS)
    is_key = key < D
    p = projected + above * projected_stride
    written = out + row * out_stride + key
    z = alpha * _read(table + tl.load(tokens + row) * table_stride, key, is_key)
    if LSTM:
        # All is read ahead of the sums, at which threads wait for each other.
        let_in = tl.sigmoid(_read(p + D, key, is_key) + z)
        let_out = tl.sigmoid(_read(p + 2 * D, key, is_key) + z)
        c = tl.zeros([KEYS], tl.float32)
        if HAS_PARENTS:
            c = _read(state + above * state_stride + D, key, is_key)
            c *= tl.sigmoid(_read(p, key, is_key) + z)
        new = _read(p + 3 * D, key, is_key) + z
        c += let_in * _gelu_of_normed(new, weight, bias, key, is_key, D, epsilon)
        tl.store(written + D, c.to(out.dtype.element_ty), mask=is_key)
        s = let_out * _gelu_of_normed(c, state_weight, state_bias, key, is_key, D, epsilon)
    else:
        s = _read(p, key, is_key) + z
        s = _gelu_of_normed(s, weight, bias, key, is_key, D, epsilon)
    tl.store(written, s.to(out.dtype.element_ty), mask=is_key)


def speculator_cell(
    embedded: Rows,
    projected: Tensor,
    above: Rows | None,
    norms: Sequence[Tensor],
    out: Tensor,
    alpha: float,
    epsilon: float,
) -> Tensor:
    """The states after some tokens: see this module.

    Args:
        embedded: the table [V, D] and the tokens, whose rows are z.
        projected: p [.., D], or [.., 4 D] of an LSTM, a row for each state above.
        above: these states [.., S], and which of them each token goes on from; None at roots, whose
            p are in order, and c' is 0.
        norms: a, b [D], of an LSTM a', b' as well.
        out: [M, S], written: s [M, D], or [s ; c] [M, 2 D] of an LSTM; bf16, fp16 or fp32, as all
            that is read. Not among the inputs.
        alpha, epsilon: of embeddings, and of norms.

    Returns:
        out.
    """
    (table, tokens), (rows, columns), lstm = embedded, out.shape, len(norms) == 4
    width = columns // 2 if lstm else columns
    require(width <= WIDEST, f"out: at most {WIDEST} columns of s are supported, got {width}")
    require(tokens is not None, "embedded.rows: expected, but not given")
    state, parents = above or (out, None)
    num_above = len(projected) if above is None else len(state)
    given: dict[str, tuple[Tensor, tuple[int, ...]]]
    given = {f"norms[{i}]": (part, (width,)) for i, part in enumerate(norms)}
    given["embedded.x"] = table, (len(table), width)
    given["projected"] = projected, (num_above, 4 * width if lstm else width)
    if above is not None:
        given["above.x"] = state, (num_above, columns)
    check_like(out, given)
    check_rows("embedded", table, tokens, torch.int64, rows)
    check_rows("above", projected, parents, torch.int32, rows)
    keys = triton.next_power_of_2(width)
    _speculator_cell[(rows,)](
        *(table, table.stride(0), tokens, projected, projected.stride(0)),
        *(out if parents is None else parents, state, state.stride(0)),
        *(*norms[:2], *norms[-2:], out, out.stride(0), width, alpha, epsilon),
        KEYS=keys,
        LSTM=lstm,
        HAS_PARENTS=parents is not None,
        num_warps=min(16, max(1, keys // 512)),
    )
    return out
