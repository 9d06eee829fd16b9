# SPDX-License-Identifier: Apache-2.0
"""The drafter's layers in one launch each are those of float64, and those of `Drafter`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_draft_layer
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype) / shape[-1] ** 0.5


def check(device: torch.device, rows: int, columns: int, first: Product, **others: Any) -> None:
    """The kernel's result against float64's, with nothing written beside it."""
    dtype = first.x.dtype

    def there(value: Any) -> Any:
        if isinstance(value, Product):
            return Product(*map(there, value))
        return value.to(device) if isinstance(value, Tensor) else value

    wide = torch.full((rows + 1, columns + 3), -77.0, dtype=dtype, device=device)
    out = wide[:rows, :columns]
    arguments = {name: there(value) for name, value in others.items()}
    assert draft_layer(there(first), out, **arguments) is out
    expected = naive_draft_layer(first, rows, **others)
    torch.testing.assert_close(
        out.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert (wide[rows:] == -77).all() and (wide[:, columns:] == -77).all()


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, 1), (torch.float32, 20), (torch.bfloat16, 4)]
)
def test_states_follow_their_parents(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """Sizes that are no multiples of any block, and a state that several beams go on from."""
    tokens = torch.arange(rows) * 3 % 11
    parents = (torch.arange(rows) // 2).int()
    check(
        device,
        rows,
        70,
        Product(random(11, 70, dtype=dtype), random(70, 70, dtype=dtype), tokens),
        second=Product(random(rows, 70, dtype=dtype), random(70, 70, dtype=dtype) * 2, parents),
        bias=random(70, dtype=dtype),
        silu=True,
    )


def test_a_condition_is_each_beam_s_of_its_request(device: torch.device) -> None:
    """The weight is the right half of a wider one."""
    weight = random(40, 130)[:, 65:]
    check(device, 6, 40, Product(random(6, 65), weight), addend=random(2, 40))


def test_a_residual_block_adds_what_it_read(device: torch.device) -> None:
    x = random(5, 48, dtype=torch.float16)
    weight, bias = random(48, 48, dtype=torch.float16), random(48, dtype=torch.float16)
    check(device, 5, 48, Product(x, weight), bias=bias, silu=True, residual=x)


X, W = torch.zeros(4, 8), torch.zeros(6, 8)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"out": torch.zeros(65, 6)}, "out: 1 to 64 rows"),
        ({"first": Product(X, W.half())}, "first.weight: expected torch.float32"),
        ({"first": Product(X[:3], W)}, "first.x: has 3 rows"),
        ({"first": Product(X, W, torch.zeros(4).int())}, "first.rows"),
        ({"second": Product(X, W, torch.zeros(4).long())}, "second.rows"),
        ({"bias": torch.zeros(5)}, "bias"),
        ({"addend": torch.zeros(3, 6)}, "addend"),
        ({"residual": torch.zeros(6, 4).t()}, "residual: the last dimension"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"first": Product(X, W), "out": torch.zeros(4, 6)}
    with pytest.raises(ValueError, match=named):
        draft_layer(**(arguments | changed))


def test_an_output_over_an_input_is_refused() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="one of the inputs"):
        draft_layer(Product(x, torch.zeros(8, 8)), x)
