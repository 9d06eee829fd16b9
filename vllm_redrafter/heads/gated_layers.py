"""What the gated head and its forms for inference have in common: the layers, and the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm_redrafter.heads.fusion import FuseLayer

EPSILON = 1e-6
"""Of norms."""


class GatedLayers(NamedTuple):
    """The head's layers.

    Attributes:
        cell: W and b.
        blocks: the residual blocks' B and b'.
        scale: [H], a.
        vocabulary: V.
        fuse: F; None where the head reads no further layers of the target.
    """

    cell: nn.Linear
    blocks: Sequence[nn.Linear]
    scale: Tensor
    vocabulary: nn.Linear
    fuse: FuseLayer | None


def normed(x: Tensor) -> Tensor:
    """n(x): in fewer calls than `rms_norm`, which is many on a CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / ((norm + EPSILON) * x.shape[-1] ** -0.5)
