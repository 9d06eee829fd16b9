"""What gated heads and their forms for inference have in common: layers, and the cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.heads.fusion import FuseLayer
from vllm_redrafter.heads.norm import normed


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


def after_cell(cell: nn.Linear, state: Tensor, embedded: Tensor) -> Tensor:
    """The state [..., H] that W and b make of a state and a token's embedding, [..., H] each."""
    # One norm of both: calls of torch are what small layers cost.
    return gated(cell(normed(torch.stack([embedded, state], dim=-2)).flatten(-2)), state)


def gated(mixed: Tensor, before: Tensor) -> Tensor:
    """z s + (1 - z) SiLU(x) with z = sigmoid(g), of [g ; x] and s."""
    # Training under autocast has narrower products than states.
    gate, candidate = mixed.to(before.dtype).chunk(2, dim=-1)
    return torch.lerp(F.silu(candidate), before, gate.sigmoid())
