# SPDX-License-Identifier: Apache-2.0
"""The gated head's cell and last norm in one launch each are float64's, and those of the head."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_draft_layer, naive_normed
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.gated_layer import (
    Rows,
    gated_cell,
    scale_normed,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def naive_gated_cell(
    embedded: Rows, state: Rows, rows: int, weight: Tensor, bias: Tensor, epsilon: float
) -> Tensor:
    """`gated_cell` by torch, in float64: [rows, N] float64."""

    def rows_of(read: Rows) -> Tensor:
        return (read.x[:rows] if read.rows is None else read.x[read.rows.long()]).double()

    e, s = rows_of(embedded), rows_of(state)
    joined = torch.cat([naive_normed(e, epsilon), naive_normed(s, epsilon)], dim=-1)
    gate, candidate = (joined @ weight.double().t() + bias.double()).chunk(2, dim=-1)
    return torch.lerp(torch.nn.functional.silu(candidate), s, gate.sigmoid())


def random(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (size * torch.randn(*shape, generator=generator)).to(dtype)


def framed(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What surrounds an output, of which it is the first rows and columns."""
    return torch.full((rows + 1, columns + 3), -77.0, dtype=dtype, device=device)


def assert_written(frame: Tensor, rows: int, columns: int, expected: Tensor) -> None:
    """What float64 expects, and nothing beside it."""
    tolerance = TOLERANCE[frame.dtype]
    found = frame[:rows, :columns].cpu().double()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (frame[rows:] == -77).all() and (frame[:, columns:] == -77).all()


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden"),
    [
        (torch.float32, 20, 70),
        (torch.bfloat16, 4, 133),
        (torch.float16, 64, 16),
    ],
)
def test_states_follow_their_parents(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    """Sizes that are no multiples of any block, and rows of very different lengths."""
    table = random(11, hidden, dtype=dtype, size=0.01)
    states = random(rows, hidden, dtype=dtype) * torch.logspace(-2, 2, rows, dtype=dtype)[:, None]
    tokens, parents = torch.arange(rows) * 3 % 11, (torch.arange(rows) // 2).int()
    weight = random(2 * hidden, 2 * hidden, dtype=dtype, size=hidden**-0.5)
    bias = random(2 * hidden, dtype=dtype)
    frame = framed(rows, hidden, dtype, device)
    out = frame[:rows, :hidden]
    found = gated_cell(
        Rows(table.to(device), tokens.to(device)),
        Rows(states.to(device), parents.to(device)),
        weight.to(device),
        bias.to(device),
        out,
        1e-3,
    )
    assert found is out
    read = Rows(table, tokens), Rows(states, parents)
    assert_written(frame, rows, hidden, naive_gated_cell(*read, rows, weight, bias, 1e-3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_block_norms_what_it_multiplies_and_adds_what_it_read(
    device: torch.device, dtype: torch.dtype
) -> None:
    x, bias = random(5, 133, dtype=dtype, size=3.0), random(133, dtype=dtype)
    weight = random(133, 133, dtype=dtype, size=0.1)
    frame = framed(5, 133, dtype, device)
    there = x.to(device)
    draft_layer(
        Product(there, weight.to(device)),
        frame[:5, :133],
        bias=bias.to(device),
        silu=True,
        residual=there,
        epsilon=1e-3,
    )
    options = {"bias": bias, "silu": True, "residual": x, "epsilon": 1e-3}
    assert_written(frame, 5, 133, naive_draft_layer(Product(x, weight), 5, **options))


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 2100), (torch.bfloat16, 7)])
def test_the_last_norm_is_scaled(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    state, scale = random(3, hidden, dtype=dtype, size=20.0), random(hidden, dtype=dtype)
    frame = framed(3, hidden, dtype, device)
    scale_normed(state.to(device), scale.to(device), frame[:3, :hidden], 1e-3)
    expected = scale.double() * naive_normed(state.double(), 1e-3)
    assert_written(frame, 3, hidden, expected)


X, W = torch.zeros(4, 8), torch.zeros(16, 16)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"out": torch.zeros(65, 8)}, "out: 1 to 64 rows"),
        ({"out": torch.zeros(8, 4).t()}, "out: the last dimension"),
        ({"out": X}, "out: is also embedded.x"),
        ({"embedded": Rows(torch.zeros(4, 7))}, "embedded.x: expected"),
        ({"embedded": Rows(X, torch.zeros(4).int())}, "embedded.rows"),
        ({"state": Rows(X.half())}, "state.x: expected torch.float32"),
        ({"state": Rows(X, torch.zeros(3).int())}, "state.rows"),
        ({"weight": torch.zeros(8, 16)}, "weight: expected"),
    ],
)
def test_what_does_not_fit_a_cell_is_named(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "embedded": Rows(X),
        "state": Rows(torch.zeros(4, 8)),
        "weight": W,
        "bias": torch.zeros(16),
        "out": torch.zeros(4, 8),
        "epsilon": EPSILON,
    }
    with pytest.raises(ValueError, match=named):
        gated_cell(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"state": torch.zeros(3, 8)}, "state: expected"),
        ({"scale": torch.zeros(8).half()}, "scale: expected torch.float32"),
        ({"out": X}, "out: is also state"),
    ],
)
def test_what_does_not_fit_the_last_norm_is_named(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"state": X, "scale": torch.zeros(8), "out": torch.zeros(4, 8)}
    with pytest.raises(ValueError, match=named):
        scale_normed(**(arguments | changed), epsilon=EPSILON)
