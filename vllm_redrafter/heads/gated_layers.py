"""What the gated head and its forms for inference have in common: the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from vllm_redrafter.heads.fusion import FuseLayer


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
