# SPDX-License-Identifier: Apache-2.0
"""Conditioning on several of the target's layers: what a fused head reads, made one hidden state.

    h' = h + F [n(h_1) ; .. ; n(h_m)]        n(x) = x / rms(x)

with h the last hidden state after the final norm, h_i the outputs of the m `target_layers`, and F a
matrix [H, m H] without bias, 0 at first. It is made once per draft. That lower layers help is
EAGLE-3's finding (arXiv 2503.01840). The norm is for training: higher layers' outputs are many
times as large as h.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

EPSILON = 1e-6
"""Added to the mean square: zeros stay zeros."""


class FuseLayer(nn.Linear):
    """F, for m layers of the target: zeros, for which no random number is drawn."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__(num_layers * hidden_size, hidden_size, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def fused(hidden: Tensor, hidden_size: int, fuse: Callable[[Tensor], Tensor] | None) -> Tensor:
    """h' [..., H], of h and the layers' outputs [..., (1 + m) H]; `fuse` is the product with F."""
    if fuse is None:
        return hidden
    layers = hidden[..., hidden_size:].view(*hidden.shape[:-1], -1, hidden_size)
    normed = F.rms_norm(layers, (hidden_size,), eps=EPSILON).flatten(-2)
    return hidden[..., :hidden_size] + fuse(normed)
