# SPDX-License-Identifier: Apache-2.0
"""What this processor multiplies fast."""

import torch


def fast_dtype() -> torch.dtype:
    """bfloat16 where this processor multiplies it natively, else float32."""
    capabilities = torch.cpu.get_capabilities()
    native = any("bf16" in name and value is True for name, value in capabilities.items())
    return torch.bfloat16 if native else torch.float32


def advice_on(dtype: torch.dtype) -> str | None:
    """Advice against computing in this dtype here; None where nothing is wrong with it."""
    if dtype != torch.bfloat16 or fast_dtype() == dtype:
        return None
    return (
        "this processor has no instructions for products in bfloat16, and computes them slower "
        "than those in float32, by more for each request in flight: --dtype float32 is faster "
        "here, and takes twice the memory"
    )
