# SPDX-License-Identifier: Apache-2.0
"""What is said of a dtype depends on the processor alone."""

import pytest
import torch

from vllm_redrafter.utils.processor import advice_on, fast_dtype


@pytest.mark.parametrize("has", ["avx512_bf16", "amx_bf16"])
def test_bfloat16_is_for_processors_that_have_it(has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, has: True})
    assert fast_dtype() == torch.bfloat16
    assert advice_on(torch.bfloat16) is None and advice_on(torch.float32) is None


def test_float32_is_advised_where_bfloat16_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"avx2": True, "avx512_bf16": False, "cpu_name": "bf16 in a name"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert fast_dtype() == torch.float32
    advice = advice_on(torch.bfloat16)
    assert advice is not None and "--dtype float32" in advice
    assert advice_on(torch.float32) is None
