# SPDX-License-Identifier: Apache-2.0
"""What is said of a dtype depends on the processor alone."""

import pytest
import torch

from vllm_redrafter.utils.processor import advice_on, fast_dtype


@pytest.mark.parametrize(
    ("capability", "is_fast"), [("avx512_bf16", True), ("amx_bf16", True), ("cpu_name", False)]
)
def test_bfloat16_is_for_processors_that_have_it(
    capability: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = {"avx2": True, "avx512_bf16": False, capability: is_fast or "bf16 in a name"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert fast_dtype() == (torch.bfloat16 if is_fast else torch.float32)
    advice = advice_on(torch.bfloat16)
    assert advice is None if is_fast else "--dtype float32" in advice
    assert advice_on(torch.float32) is None
