"""What the onepass head and its forms for inference have in common: the layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from vllm_redrafter.heads.fusion import FuseLayer
from vllm_redrafter.heads.selector import Selector


class OnePassLayers(NamedTuple):
    """The head's layers.

    Attributes:
        cell: of s.
        base: of g_d.
        first: A and b_A.
        mix: M and b_M.
        change: D and b_D.
        scale: [H], a.
        fuse: F of `fusion.py`; None where the head reads no further layers of the target.
    """

    cell: nn.Linear
    base: Selector
    first: nn.Linear
    mix: nn.Linear
    change: nn.Linear
    scale: Tensor
    fuse: FuseLayer | None
