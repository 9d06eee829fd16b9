# SPDX-License-Identifier: Apache-2.0
"""Each of a head's layers, in one launch, is that of float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_draft_layer, naive_normed
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell, scale_normed
from vllm_redrafter.triton_kernels.gather_dot import gather_dot

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EPSILON = 1e-3


def naive_gated_cell(
    embedded: Rows, state: Rows, rows: int, weight: Tensor, bias: Tensor, epsilon: float
) -> Tensor:
    """`gated_cell` by torch: [rows, N] float64."""

    def rows_of(read: Rows) -> Tensor:
        return (read.x[:rows] if read.rows is None else read.x[read.rows.long()]).double()

    e, s = rows_of(embedded), rows_of(state)
    joined = torch.cat([naive_normed(e, epsilon), naive_normed(s, epsilon)], dim=-1)
    gate, candidate = (joined @ weight.double().t() + bias.double()).chunk(2, dim=-1)
    return torch.lerp(torch.nn.functional.silu(candidate), s, gate.sigmoid())


def naive_gather_dot(
    x: Tensor, weight: Tensor, tokens: Tensor, scale: Tensor | None, epsilon: float
) -> Tensor:
    """`gather_dot` by torch: [R * beams, C] float64."""
    multiplied = x.double()
    if scale is not None:
        multiplied = scale.double() * naive_normed(multiplied, epsilon)
    rows = weight[tokens.long()].double()
    by_request = multiplied.view(len(tokens), -1, x.shape[1])
    return (by_request @ rows.transpose(1, 2)).flatten(0, 1)


def random(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (size * torch.randn(*shape, generator=generator)).to(dtype)


def uneven(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different lengths."""
    scale = torch.logspace(-2, 1, rows, dtype=dtype)[:, None]
    return random(rows, columns, dtype=dtype) * scale


def there(value: Any, device: torch.device) -> Any:
    if isinstance(value, Product | Rows):
        return type(value)(*(there(part, device) for part in value))
    return value.to(device) if isinstance(value, Tensor) else value


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


class Output:
    """The first rows and columns of a wider tensor, in which nothing else may be written."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.wide = torch.full((rows + 1, columns + 3), -77.0, dtype=dtype, device=device)
        self.out = self.wide[:rows, :columns]

    def check(self, expected: Tensor) -> None:
        assert_close(self.out, expected, self.wide.dtype)
        rows, columns = self.out.shape
        assert (self.wide[rows:] == -77).all() and (self.wide[:, columns:] == -77).all()


def check_layer(
    device: torch.device, rows: int, columns: int, first: Product, **others: Any
) -> None:
    output = Output(rows, columns, first.x.dtype, device)
    arguments = {name: there(value, device) for name, value in others.items()}
    assert draft_layer(there(first, device), output.out, **arguments) is output.out
    output.check(naive_draft_layer(first, rows, **others))


# Sizes are no multiples of any block.


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, 1), (torch.float32, 20), (torch.bfloat16, 4)]
)
def test_states_follow_their_parents(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    """Several beams continue one state."""
    tokens, parents = torch.arange(rows) * 3 % 11, (torch.arange(rows) // 2).int()
    weight = random(70, 70, dtype=dtype, size=70**-0.5)
    check_layer(
        device,
        rows,
        70,
        Product(random(11, 70, dtype=dtype), weight, tokens),
        second=Product(random(rows, 70, dtype=dtype), weight * 2, parents),
        bias=random(70, dtype=dtype),
        silu=True,
    )


def test_a_condition_is_each_beam_s_of_its_request(device: torch.device) -> None:
    """The weight is the right half of a wider one."""
    weight = random(40, 130, size=0.1)[:, 65:]
    check_layer(device, 6, 40, Product(random(6, 65), weight), addend=random(2, 40))


@pytest.mark.parametrize("epsilon", [None, EPSILON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_residual_block_adds_what_it_read(
    device: torch.device, dtype: torch.dtype, epsilon: float | None
) -> None:
    x, bias = random(5, 133, dtype=dtype), random(133, dtype=dtype)
    product = Product(x, random(133, 133, dtype=dtype, size=0.1))
    check_layer(device, 5, 133, product, bias=bias, silu=True, residual=x, epsilon=epsilon)


@pytest.mark.parametrize(
    ("dtype", "rows", "hidden"),
    [(torch.float32, 20, 70), (torch.bfloat16, 4, 133), (torch.float16, 64, 16)],
)
def test_a_gated_state_follows_its_parent(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    tokens, parents = torch.arange(rows) * 3 % 11, (torch.arange(rows) // 2).int()
    arguments = (
        Rows(random(11, hidden, dtype=dtype, size=0.01), tokens),
        Rows(uneven(rows, hidden, dtype), parents),
        random(2 * hidden, 2 * hidden, dtype=dtype, size=hidden**-0.5),
        random(2 * hidden, dtype=dtype),
    )
    output = Output(rows, hidden, dtype, device)
    on_device = [there(argument, device) for argument in arguments]
    assert gated_cell(*on_device, output.out, EPSILON) is output.out
    embedded, state, weight, bias = arguments
    output.check(naive_gated_cell(embedded, state, rows, weight, bias, EPSILON))


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 2100), (torch.bfloat16, 7)])
def test_the_last_norm_is_scaled(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    state, scale = random(3, hidden, dtype=dtype, size=20.0), random(hidden, dtype=dtype)
    output = Output(3, hidden, dtype, device)
    scale_normed(state.to(device), scale.to(device), output.out, EPSILON)
    output.check(scale.double() * naive_normed(state.double(), EPSILON))


@pytest.mark.parametrize("scaled", [False, True], ids=["as it is", "normed"])
@pytest.mark.parametrize(
    ("dtype", "requests", "beams", "count", "width"),
    [
        (torch.float32, 2, 3, 40, 70),
        (torch.bfloat16, 1, 4, 33, 300),
        (torch.float32, 2, 1, 1, 130),
    ],
)
def test_each_beam_is_multiplied_with_its_request_s_rows(
    device: torch.device,
    dtype: torch.dtype,
    requests: int,
    beams: int,
    count: int,
    width: int,
    scaled: bool,
) -> None:
    x = uneven(requests * beams, width, dtype)
    weight = random(90, width, dtype=dtype, size=width**-0.5)
    tokens = torch.stack([torch.randperm(90)[:count] for _ in range(requests)]).int()
    scale = random(width, dtype=dtype) if scaled else None
    on_device = [there(part, device) for part in (x, weight, tokens)]
    found = gather_dot(*on_device, scale=there(scale, device), epsilon=EPSILON)
    assert found.dtype == torch.float32
    assert_close(found, naive_gather_dot(x, weight, tokens, scale, EPSILON), dtype)


X, W, T = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(2, 3).int()
GOOD: dict[Any, dict[str, Any]] = {
    draft_layer: {"first": Product(X, W), "out": torch.zeros(4, 6)},
    gated_cell: {
        "embedded": Rows(X),
        "state": Rows(torch.zeros(4, 8)),
        "weight": torch.zeros(16, 16),
        "bias": torch.zeros(16),
        "out": torch.zeros(4, 8),
        "epsilon": EPSILON,
    },
    scale_normed: {
        "state": X,
        "scale": torch.zeros(8),
        "out": torch.zeros(4, 8),
        "epsilon": EPSILON,
    },
    gather_dot: {"x": X, "weight": W, "tokens": T},
}


@pytest.mark.parametrize(
    ("launch", "changed", "named"),
    [
        (draft_layer, {"out": torch.zeros(65, 6)}, "out: 1 to 64 rows"),
        (
            draft_layer,
            {"first": Product(X, W.half())},
            r"first.weight: expected \[6, 8\] torch.float32",
        ),
        (draft_layer, {"first": Product(X[:3], W)}, "first.x: has 3 rows"),
        (draft_layer, {"second": Product(X, W, torch.zeros(4).long())}, "second.rows"),
        (draft_layer, {"bias": torch.zeros(5)}, "bias"),
        (draft_layer, {"residual": torch.zeros(6, 4).t()}, "residual: the last dimension"),
        (draft_layer, {"first": Product(X, torch.zeros(8, 8)), "out": X}, "one of the inputs"),
        (gated_cell, {"out": X}, "out: is also embedded.x"),
        (gated_cell, {"embedded": Rows(torch.zeros(4, 7))}, "embedded.x: expected"),
        (gated_cell, {"embedded": Rows(X, torch.zeros(4).int())}, "embedded.rows"),
        (gated_cell, {"state": Rows(X.half())}, r"state.x: expected \[4, 8\] torch.float32"),
        (gated_cell, {"weight": torch.zeros(8, 16)}, "weight: expected"),
        (scale_normed, {"state": torch.zeros(3, 8)}, "state: expected"),
        (scale_normed, {"out": X}, "out: is also state"),
        (gather_dot, {"x": X.double()}, "x: bf16"),
        (gather_dot, {"x": torch.zeros(130, 8)}, "x: at most 64 beams"),
        (gather_dot, {"weight": torch.zeros(9, 7)}, "weight: expected"),
        (gather_dot, {"tokens": T.long()}, "tokens: expected torch.int32"),
    ],
)
def test_what_does_not_fit_is_named(launch: Any, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        launch(**(GOOD[launch] | changed))
