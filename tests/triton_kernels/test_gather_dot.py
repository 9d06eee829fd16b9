# SPDX-License-Identifier: Apache-2.0
"""Logits of gathered rows are float64's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_normed
from vllm_redrafter.triton_kernels.gather_dot import gather_dot

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def naive_gather_dot(
    x: Tensor,
    weight: Tensor,
    tokens: Tensor,
    scale: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """`gather_dot` by torch, in float64: [R * beams, C] float64."""
    multiplied = x.double()
    if scale is not None:
        multiplied = scale.double() * naive_normed(multiplied, epsilon)
    rows = weight[tokens.long()].double()
    by_request = multiplied.view(len(tokens), -1, x.shape[1])
    return (by_request @ rows.transpose(1, 2)).flatten(0, 1)


def random(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (size * torch.randn(*shape, generator=generator)).to(dtype)


def chosen(requests: int, count: int, vocabulary: int = 90) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randperm(vocabulary, generator=generator)[:count] for _ in range(requests)]
    return torch.stack(rows).int()


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
    """Sizes that are no multiples of any block, and rows of very different lengths."""
    rows = requests * beams
    x = random(rows, width, dtype=dtype) * torch.logspace(-2, 1, rows, dtype=dtype)[:, None]
    weight = random(90, width, dtype=dtype, size=width**-0.5)
    scale = random(width, dtype=dtype) if scaled else None
    tokens = chosen(requests, count)
    on_device = None if scale is None else scale.to(device)
    there = x.to(device), weight.to(device), tokens.to(device)
    found = gather_dot(*there, scale=on_device, epsilon=1e-3).cpu()
    expected = naive_gather_dot(x, weight, tokens, scale=scale, epsilon=1e-3)
    assert found.dtype == torch.float32
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


X, W, T = torch.zeros(4, 8), torch.zeros(9, 8), torch.zeros(2, 3).int()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"x": X.double()}, "x: bf16"),
        ({"x": torch.zeros(130, 8)}, "x: at most 64 beams"),
        ({"weight": torch.zeros(9, 7)}, "weight: expected"),
        ({"weight": torch.zeros(8, 9).t()}, "weight: the last dimension"),
        ({"tokens": T.long()}, "tokens: expected torch.int32"),
        ({"tokens": torch.zeros(3, 3).int()}, "tokens"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"x": X, "weight": W, "tokens": T}
    with pytest.raises(ValueError, match=named):
        gather_dot(**(arguments | changed))
