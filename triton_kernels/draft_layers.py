# SPDX-License-Identifier: Apache-2.0
"""The drafter's small layers for few rows: a product with all that surrounds it in one launch.

    out[m] = SiLU?(x[r_m] X^T + s[p_m] S^T + bias + addend[m // group]) + residual[m]

where every part but the first may be absent. The three layers of `heads/recurrent.py` are of this
form:

    state          SiLU(W_w e(x_t) + W_u s_{t-1} + b_u): r_m is the token, x the embedding's table,
                   p_m the beam that is continued
    input_proj     W_s s + (W_h h + b), the latter the same for a request's beams
    residual block x + SiLU(W x + b)

Of a gated head, the residual block is x + SiLU(W n(x) + b) with n(x) = sqrt(K) x / (|x| + epsilon).
A row's norm is a factor of its product, W n(x) = (W x) sqrt(K) / (|x| + epsilon), and what it takes
passes by while the product is made.

Weights are read once, by thread blocks of 32 columns each; at a few rows that is all the time
there is to spend, and a launch per operation would be most of it. From MAX_ROWS rows on products
of matrices cost more than launches, and torch's are the better ones.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout, require_like

MAX_ROWS = 64
"""One block of rows; more would read the weights again."""

COLUMNS = 32
"""Of the output, per thread block."""

KEY_BYTES = 256
"""Of each row and column, per step of the loop."""

STAGES = tl.constexpr(4)
"""Of the loop: steps under way at once, but for one."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def add_product(
    x,  # [ROWS] pointers to rows of K
    is_row,  # [ROWS]
    weight,  # [COLUMNS] pointers to rows of K: what gives the columns
    is_column,  # [COLUMNS]
    total,  # [ROWS, COLUMNS] fp32 values, added to; zeros where NORMED
    K,
    epsilon,  # of a norm; read where NORMED
    KEYS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """total + x weight^T, or n(x) weight^T where NORMED.

    fp32 is multiplied as such, not as TF32.
    """
    if NORMED:
        squares = tl.zeros([total.shape[0]], tl.float32)
    for start in tl.range(0, K, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        of_row = x[:, None] + key[None, :]
        is_left = is_row[:, None] & (key < K)[None, :]
        left = tl.load(of_row, mask=is_left, other=0.0)
        right = tl.load(
            weight[None, :] + key[:, None], mask=(key < K)[:, None] & is_column[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
        if NORMED:
            again = left
            if total.shape[0] < 64:
                # Triton swizzles what only products read. ldmatrix reads eight rows at once, which
                # are in the same banks unless swizzled; for the norm they are loaded again, by
                # another policy lest the loads be merged. 64 rows are wgmma's, which swizzles them.
                again = tl.load(of_row, mask=is_left, other=0.0, eviction_policy="evict_last")
            wide = again.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
    if NORMED:
        total *= (tl.sqrt_rn(K.to(tl.float32)) / (tl.sqrt(squares) + epsilon))[:, None]
    return total


@triton.jit(do_not_specialize=["M"])
def _draft_layer(
    x,  # [.., K]
    x_stride,
    x_rows,  # [M] int64; read where HAS_X_ROWS
    x_weight,  # [N, K]
    x_weight_stride,
    s,  # [.., K_S]; read where HAS_S
    s_stride,
    s_rows,  # [M] int32; likewise
    s_weight,  # [N, K_S]; likewise
    s_weight_stride,
    bias,  # [N]; read where HAS_BIAS
    addend,  # [M / GROUP, N]; read where HAS_ADDEND
    addend_stride,
    residual,  # [M, N]; read where HAS_RESIDUAL
    residual_stride,
    out,  # [M, N], written
    out_stride,
    M,
    N,
    K,
    K_S,
    epsilon,  # of the norm; read where NORMED
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    NORMED: tl.constexpr,
    SILU: tl.constexpr,
    HAS_X_ROWS: tl.constexpr,
    HAS_S: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """COLUMNS columns of all rows."""
    row = tl.arange(0, ROWS)
    is_row = row < M
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_column = column < N
    is_out = is_row[:, None] & is_column[None, :]
    x_row = tl.load(x_rows + row, mask=is_row, other=0) if HAS_X_ROWS else row.to(tl.int64)
    of_row, of_column = x + x_row * x_stride, x_weight + column * x_weight_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = add_product(of_row, is_row, of_column, is_column, total, K, epsilon, KEYS, NORMED)
    if HAS_S:
        s_row = tl.load(s_rows + row, mask=is_row, other=0).to(tl.int64)
        of_row, of_column = s + s_row * s_stride, s_weight + column * s_weight_stride
        total = add_product(
            of_row, is_row, of_column, is_column, total, K_S, epsilon, KEYS, NORMED=False
        )
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_ADDEND:
        at = (row // GROUP).to(tl.int64)[:, None] * addend_stride + column[None, :]
        total += tl.load(addend + at, mask=is_out, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    if HAS_RESIDUAL:
        at = row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        total += tl.load(residual + at, mask=is_out, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_out)


class Product(NamedTuple):
    """One product of a layer.

    Attributes:
        x: [.., K], what is multiplied.
        weight: [N, K].
        rows: [M] int64 (of the first product) or int32 (of the second): which rows of x; None for
            the first M in order.
    """

    x: Tensor
    weight: Tensor
    rows: Tensor | None = None


def draft_layer(
    first: Product,
    out: Tensor,
    second: Product | None = None,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    silu: bool = False,
    residual: Tensor | None = None,
    epsilon: float | None = None,
) -> Tensor:
    """A layer of the drafter for at most 64 rows: see this module.

    Args:
        first: its product.
        out: [M, N], written; of the first product's dtype: bf16, fp16 or fp32. Not among the
            inputs: other thread blocks still read them.
        second: another to add to it; it has `rows`.
        bias: [N].
        addend: [M / group, N]: each row is added to `group` rows in turn.
        silu: take the SiLU of the sum.
        residual: [M, N], added at the end.
        epsilon: of the norm of the first product's rows; None where they are taken as they are.

    Returns:
        out.
    """
    rows, columns = out.shape
    require(1 <= rows <= MAX_ROWS, f"out: 1 to {MAX_ROWS} rows are supported, got {rows}")
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    for name, product in (("first", first), ("second", second)):
        if product is not None:
            length = product.x.shape[1]
            shapes[f"{name}.x"] = product.x, (len(product.x), length)
            shapes[f"{name}.weight"] = product.weight, (columns, length)
    for name, tensor, shape in (("bias", bias, (columns,)), ("residual", residual, out.shape)):
        if tensor is not None:
            shapes[name] = tensor, tuple(shape)
    if addend is not None:
        require(
            rows % addend.shape[0] == 0,
            f"addend: {list(addend.shape)} does not fit {rows} rows of {columns}",
        )
        shapes["addend"] = addend, (len(addend), columns)
    check_like(out, shapes)
    check_rows("first", first.x, first.rows, torch.int64, rows)
    if second is not None:
        require(second.rows is not None, "second: its rows must be given")
        check_rows("second", second.x, second.rows, torch.int32, rows)
    other = second if second is not None else first
    keys = KEY_BYTES // out.element_size()
    _draft_layer[(triton.cdiv(columns, COLUMNS),)](
        first.x,
        first.x.stride(0),
        first.rows if first.rows is not None else out,
        first.weight,
        first.weight.stride(0),
        other.x,
        other.x.stride(0),
        other.rows if second is not None else out,
        other.weight,
        other.weight.stride(0),
        bias if bias is not None else out,
        addend if addend is not None else out,
        addend.stride(0) if addend is not None else 0,
        residual if residual is not None else out,
        residual.stride(0) if residual is not None else 0,
        out,
        out.stride(0),
        rows,
        columns,
        first.x.shape[1],
        other.x.shape[1],
        epsilon or 0.0,
        GROUP=rows // addend.shape[0] if addend is not None else 1,
        ROWS=max(16, triton.next_power_of_2(rows)),
        COLUMNS=COLUMNS,
        KEYS=keys,
        NORMED=epsilon is not None,
        SILU=silu,
        HAS_X_ROWS=first.rows is not None,
        HAS_S=second is not None,
        HAS_BIAS=bias is not None,
        HAS_ADDEND=addend is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )
    return out


def check_like(out: Tensor, given: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """What is read has these shapes, and is of the kind that `out` is, and elsewhere."""
    require(out.dtype in DTYPES, f"out: bf16, fp16 or fp32 expected, got {out.dtype}")
    require_like(out, out=(out, tuple(out.shape)), **given)
    for name, (tensor, _) in given.items():
        require(
            tensor.data_ptr() != out.data_ptr(),
            f"out: is also {name}, which is still read when it is written",
        )


def check_rows(name: str, x: Tensor, chosen: Tensor | None, dtype: torch.dtype, rows: int) -> None:
    """There are so many rows: of x, or chosen from x by integers of this dtype.

    Raises:
        ValueError: there are not; `name` is what x and its rows belong to.
    """
    if chosen is None:
        require(x.shape[0] >= rows, f"{name}.x: has {x.shape[0]} rows, {rows} are needed")
        return
    require_layout(x.device, **{f"{name}.rows": (chosen, dtype, (rows,))})
