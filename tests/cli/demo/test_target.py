"""The training of the demo's target."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon

from vllm_redrafter.cli.demo import target


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)], ids=str)
def test_orthogonalised_is_torch_s_own_without_its_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape)
    before = grad.clone()
    settings = ((3.4445, -4.775, 2.0315), 5, 1e-7)
    found = target.orthogonalised(grad, *settings)
    expected = _muon._zeropower_via_newtonschulz(grad, *settings).float()
    assert found.dtype == torch.float32 and torch.equal(grad, before)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_computes_in_what_the_processor_has(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _muon._zeropower_via_newtonschulz
    monkeypatch.setattr(target, "fast_dtype", lambda: dtype)
    with target.native_muon():
        replaced = _muon._zeropower_via_newtonschulz is not original
    assert replaced == (dtype == torch.float32)
    assert _muon._zeropower_via_newtonschulz is original
