"""Weights in fp8 (e4m3), each row with a scale of its own: half of the bytes of 16-bit weights.

A number has three bits behind its leading one: a weight moves by a sixteenth of itself at most,
and by less than the row's largest / 2^18 where it is tiny.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
"""448."""
AT_ONCE = 2**24
"""Weights that are held in float32 meanwhile: a vocabulary-wide layer has hundreds of millions."""


class RowsInFp8(NamedTuple):
    """Rows of a weight.

    Attributes:
        quantised: [rows, columns] e4m3.
        scales: [rows, 1] of the weight's dtype, in which kernels have them: the rows' factors.
    """

    quantised: Tensor
    scales: Tensor


def quantise_rows(weight: Tensor) -> RowsInFp8:
    """The rows in fp8, of [rows, columns] of any floating dtype."""
    quantised = torch.empty_like(weight, dtype=FP8, requires_grad=False)
    scales = weight.new_empty(weight.shape[0], 1, requires_grad=False)
    rows = max(1, AT_ONCE // max(1, weight.shape[1]))
    parts = (torch.split(tensor, rows) for tensor in (weight.detach(), quantised, scales))
    for part, part_quantised, part_scales in zip(*parts, strict=True):
        exact = part.float()
        scale = (exact.abs().amax(dim=1, keepdim=True) / LARGEST).to(weight.dtype)
        # A row of zeros keeps any scale, and one too small for a scale of this dtype becomes zeros.
        part_scales.copy_(torch.where(scale > 0, scale, 1.0))
        part_quantised.copy_((exact / part_scales.float()).clamp_(-LARGEST, LARGEST))
    return RowsInFp8(quantised, scales)


def rounded_rows(weight: Tensor) -> Tensor:
    """What a layer in fp8 multiplies with: [rows, columns] of the weight's dtype."""
    quantised, scales = quantise_rows(weight)
    return (quantised.float() * scales.float()).to(weight.dtype)
