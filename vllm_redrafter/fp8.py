"""Weights in fp8 (e4m3), each row with a scale of its own: half of the bytes of 16-bit weights.

A number has three bits behind its leading one: a weight moves by a sixteenth of itself at most,
and by less than the row's largest / 2^18 where it is tiny.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448."""


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in fp8, and what they are multiplied with.

    Args:
        weight: [rows, columns], of any floating dtype.

    Returns:
        (e4m3 [rows, columns]; scales [rows, 1] of the weight's dtype, in which kernels have them).
    """
    largest = weight.detach().float().abs().amax(dim=1, keepdim=True)
    # A row of zeros keeps any scale; of the others, none is so small that the dtype lacks it.
    scales = (largest / LARGEST).to(weight.dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    scaled = (weight.detach().float() / scales.float()).clamp_(-LARGEST, LARGEST)
    return scaled.to(FP8), scales


def rounded_rows(weight: Tensor) -> Tensor:
    """What a layer in fp8 multiplies with: [rows, columns] of the weight's dtype."""
    quantised, scales = quantise_rows(weight)
    return (quantised.float() * scales.float()).to(weight.dtype)
