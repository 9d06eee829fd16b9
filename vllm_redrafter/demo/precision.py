"""What this processor multiplies fast."""

from __future__ import annotations

import torch


def fast_dtype() -> torch.dtype:
    """bfloat16 where this processor multiplies it natively, else float32."""
    capabilities = torch.cpu.get_capabilities()
    native = any("bf16" in name and value is True for name, value in capabilities.items())
    return torch.bfloat16 if native else torch.float32
