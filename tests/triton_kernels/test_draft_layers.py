# SPDX-License-Identifier: Apache-2.0
"""Each of a head's layers, in one launch, is what torch makes of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_normed
from vllm_redrafter.heads import norm, speculators
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell, scale_normed
from vllm_redrafter.triton_kernels.gather_dot import gather_dot
from vllm_redrafter.triton_kernels.speculator_cell import speculator_cell

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EPSILON = 1e-3


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
    return random(rows, columns, dtype=dtype) * torch.logspace(-2, 1, rows, dtype=dtype)[:, None]


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


# Sizes are no multiples of any block.


def test_a_condition_is_each_beam_s_of_its_request(device: torch.device) -> None:
    """The weight is the right half of a wider one."""
    x, weight, added = random(6, 65), random(40, 130, size=0.1)[:, 65:], random(2, 40)
    output = Output(6, 40, x.dtype, device)
    product = Product(x.to(device), weight.to(device))
    assert draft_layer(product, output.out, addend=added.to(device)) is output.out
    output.check(x.double() @ weight.double().t() + added.double().repeat_interleave(3, dim=0))


@pytest.mark.parametrize("epsilon", [None, EPSILON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_residual_block_adds_what_it_read(
    device: torch.device, dtype: torch.dtype, epsilon: float | None
) -> None:
    given = [random(5, 133), random(133, 133, size=0.1), random(133)]
    x, weight, bias = (part.to(device, dtype) for part in given)
    output = Output(5, 133, dtype, device)
    added = {"bias": bias, "silu": True, "residual": x}
    draft_layer(Product(x, weight), output.out, **added, epsilon=epsilon)
    x, weight, bias = (part.cpu().double() for part in (x, weight, bias))
    read = x if epsilon is None else naive_normed(x, epsilon)
    output.check(x + torch.nn.functional.silu(read @ weight.t() + bias))


HEADS = RecurrentHead, GatedHead, speculators.MlpSpeculator, speculators.LstmSpeculator


def cell_of(
    head: Any, embedded: Rows, condition: Tensor, above: Rows | None, out: Tensor
) -> Tensor:
    """A head's states after some tokens, in one launch, and a product where it is torch's."""
    if isinstance(head, RecurrentHead):
        product = Product(embedded.x, head.rnn_w.weight, embedded.rows)
        second = above and Product(above.x, head.rnn_u.weight, above.rows)
        return draft_layer(product, out, second, bias=head.rnn_u.bias, silu=True)
    if isinstance(head, GatedHead):
        cell = head.cell.weight, head.cell.bias
        return gated_cell(embedded, above or Rows(condition), *cell, out, norm.EPSILON)
    width, alpha = head.config.width, head.config.alpha
    projected = condition if above is None else head.proj[1](above.x[:, :width])
    norms = [part for name, part in head.named_parameters() if "ln" in name]
    return speculator_cell(embedded, projected, above, norms, out, alpha, speculators.EPSILON)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [(torch.float32, 20, 70), (torch.bfloat16, 4, 133), (torch.float16, 64, 16)],
)
@torch.no_grad()
def test_a_state_is_that_of_the_head(
    device: torch.device, kind: Any, dtype: torch.dtype, rows: int, width: int
) -> None:
    """At roots, and where several beams continue one state."""
    sizes = {"exit_dim": width, "rnn": True, "width": width, "num_levels": 2}
    head = kind(kind.config_class.from_dict({"vocab_size": 11, "hidden_size": width, **sizes}))
    head.to(device, dtype)
    for i, parameter in enumerate(head.parameters()):
        parameter.copy_(random(i + 1, *parameter.shape, size=width**-0.5)[i])
    table = random(11, width, dtype=dtype, size=0.01).to(device)
    in_order = torch.arange(rows, device=device)
    tokens, parents = in_order * 3 % 11, in_order.int() // 2
    condition = head.condition(uneven(rows, width, dtype).to(device))
    root = head.start(condition, table[tokens])
    below = head.advance(root[parents], table[tokens], 1)
    for above, expected in ((None, root), (Rows(root, parents), below)):
        output = Output(*expected.shape, dtype, device)
        assert cell_of(head, Rows(table, tokens), condition, above, output.out) is output.out
        output.check(expected.cpu().double())


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 2100), (torch.bfloat16, 7)])
def test_the_last_norm_is_scaled(device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    state, scale = random(3, hidden, dtype=dtype, size=20.0), random(hidden, dtype=dtype)
    output = Output(3, hidden, dtype, device)
    scale_normed(state.to(device), scale.to(device), output.out, EPSILON)
    output.check(scale.double() * naive_normed(state.double(), EPSILON))


@pytest.mark.parametrize("scaled", [False, True], ids=["as it is", "normed"])
@pytest.mark.parametrize(
    ("dtype", "requests", "beams", "count", "width"),
    [(torch.float32, 2, 3, 40, 70), (torch.bfloat16, 1, 4, 33, 300), (torch.float32, 2, 1, 1, 130)],
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
    on_device = [part.to(device) for part in (x, weight, tokens)]
    scaling = None if scale is None else scale.to(device)
    found = gather_dot(*on_device, scale=scaling, epsilon=EPSILON)
    assert found.dtype == torch.float32
    assert_close(found, naive_gather_dot(x, weight, tokens, scale, EPSILON), dtype)
