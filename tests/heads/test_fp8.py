"""Weights in fp8: how far they move, and what does not."""

from __future__ import annotations

import pytest
import torch

from vllm_redrafter.heads import fp8
from vllm_redrafter.heads.fp8 import FP8, LARGEST, quantise_rows, rounded_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_moves_by_a_sixteenth_of_itself_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Rows of sizes that differ by four orders of magnitude.
    weight = (torch.randn(40, 64) * torch.logspace(-3, 1, 40)[:, None]).to(dtype)
    moved = (rounded_rows(weight).float() - weight.float()).abs()
    tiny = weight.float().abs().amax(dim=1, keepdim=True) / 2**18
    own = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert (moved <= weight.float().abs() * (1 / 16 + own) + tiny).all()
    assert moved.max() > 0


def test_what_was_rounded_is_not_rounded_again() -> None:
    torch.manual_seed(0)
    once = rounded_rows(torch.randn(8, 32))
    torch.testing.assert_close(rounded_rows(once), once, rtol=1e-6, atol=0)


def test_each_row_has_the_whole_range() -> None:
    quantised, scales = quantise_rows(torch.tensor([[1e-4, -2e-4], [300.0, 100.0]]))
    assert quantised.dtype == FP8
    assert quantised.float().abs().amax(dim=1).tolist() == [LARGEST, LARGEST]
    torch.testing.assert_close(scales.flatten() * LARGEST, torch.tensor([2e-4, 300.0]))


def test_some_of_the_rows_are_quantised_as_all_of_them_are() -> None:
    """So the ranks of tensor parallelism, who have some each, draft as one."""
    torch.manual_seed(0)
    weight = torch.randn(10, 32) * torch.arange(1, 11)[:, None]
    for whole, part in zip(quantise_rows(weight), quantise_rows(weight[3:7]), strict=True):
        assert torch.equal(whole[3:7].float(), part.float())


def test_large_weights_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 8)
    whole = quantise_rows(weight)
    monkeypatch.setattr(fp8, "AT_ONCE", 24)
    for found, expected in zip(quantise_rows(weight), whole, strict=True):
        assert torch.equal(found.float(), expected.float())


def test_a_row_of_zeros_stays_zero() -> None:
    assert rounded_rows(torch.zeros(2, 4)).tolist() == [[0.0] * 4] * 2
