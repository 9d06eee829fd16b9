"""What a small state changes of what the root told is float64's, and the onepass head's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.heads.onepass import OnePassConfig, OnePassHead
from vllm_redrafter.triton_kernels.correction import correct, naive_correct
from vllm_redrafter.triton_kernels.gated_layer import (
    Rows,
    gated_cell,
    naive_gated_cell,
    scale_normed,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (size * torch.randn(*shape, generator=generator)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "requests", "beams", "hidden", "small"),
    [
        (torch.float32, 2, 3, 70, 20),
        (torch.bfloat16, 1, 4, 133, 37),
        (torch.float16, 16, 4, 16, 130),
    ],
)
def test_beams_correct_what_their_root_told(
    device: torch.device, dtype: torch.dtype, requests: int, beams: int, hidden: int, small: int
) -> None:
    """Sizes that are no multiples of any block; nothing beside the output is written."""
    rows = requests * beams
    state, told = random(rows, small, dtype=dtype), random(requests, hidden, dtype=dtype)
    weight = random(2 * hidden, small, dtype=dtype, size=small**-0.5)
    bias = random(2 * hidden, dtype=dtype)
    frame = torch.full((rows + 1, hidden + 3), -77.0, dtype=dtype, device=device)
    given = (tensor.to(device) for tensor in (state, weight, bias, told))
    correct(*given, frame[:rows, :hidden])
    tolerance = TOLERANCE[dtype]
    expected = naive_correct(state, weight, bias, told)
    found = frame[:rows, :hidden].cpu().double()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (frame[rows:] == -77).all() and (frame[:, hidden:] == -77).all()


@pytest.mark.parametrize(
    ("dtype", "hidden", "small"), [(torch.float32, 70, 20), (torch.bfloat16, 64, 1030)]
)
def test_a_state_may_be_of_another_width_than_embeddings(
    device: torch.device, dtype: torch.dtype, hidden: int, small: int
) -> None:
    embedded, state = random(5, hidden, dtype=dtype, size=3.0), random(5, small, dtype=dtype)
    weight = random(2 * small, hidden + small, dtype=dtype, size=(hidden + small) ** -0.5)
    bias, out = random(2 * small, dtype=dtype), torch.empty(5, small, dtype=dtype, device=device)
    rows = Rows(embedded.to(device)), Rows(state.to(device))
    gated_cell(*rows, weight.to(device), bias.to(device), out, 1e-3)
    expected = naive_gated_cell(Rows(embedded), Rows(state), 5, weight, bias, 1e-3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_they_are_the_head_s(device: torch.device) -> None:
    torch.manual_seed(0)
    head = OnePassHead(OnePassConfig(50, 16, levels=3, state_size=6, base_rank=5)).to(device).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    embedded, state = random(3, 16).to(device), random(3, 22).to(device)
    with torch.no_grad():
        root, small = state.tensor_split([16], dim=1)
        after = torch.empty(3, 6, device=device)
        before = Rows(small.contiguous())
        gated_cell(Rows(embedded), before, head.mix.weight, head.mix.bias, after, EPSILON)
        expected = head.advance(state, embedded)
        torch.testing.assert_close(after, expected[:, 16:])
        y, out = torch.empty(2, 3, 16, device=device)
        told = head.base.at(root, 2)
        correct(after, head.change.weight, head.change.bias, told, y)
        scale_normed(y, head.scale, out, EPSILON)
        torch.testing.assert_close(out, head.features(state, expected, 2))


X, OUT = torch.zeros(4, 3), torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"out": torch.zeros(65, 8)}, "out: 1 to 64 rows"),
        ({"state": torch.zeros(3, 3)}, "state: expected"),
        ({"state": X.half()}, "state: expected torch.float32"),
        ({"weight": torch.zeros(16, 4)}, "weight: expected"),
        ({"bias": torch.zeros(8)}, "bias: expected"),
        ({"told": torch.zeros(3, 8)}, "told: 3 rows do not fit"),
        ({"told": OUT}, "out: is also told"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "state": X,
        "weight": torch.zeros(16, 3),
        "bias": torch.zeros(16),
        "told": torch.zeros(2, 8),
        "out": OUT,
    }
    with pytest.raises(ValueError, match=named):
        correct(**(arguments | changed))
