"""Conditioning on several of the target's layers: what a fused head reads, made one hidden state.

    h' = h + F [h_1 ; .. ; h_n]

with h the last hidden state after the final norm, h_i the outputs of `target_layers` as they are,
and F a matrix [H, n H] without bias. With F = 0, as it begins, a fused head is the plain one. Once
per draft: a search does not know of it. That lower layers tell what the last one has forgotten is
EAGLE-3's finding (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class FuseLayer(nn.Linear):
    """F, for n layers of the target: zeros, for which no random number is drawn."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__(num_layers * hidden_size, hidden_size, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def fused(hidden: Tensor, hidden_size: int, fuse: Callable[[Tensor], Tensor] | None) -> Tensor:
    """h': [..., H].

    Args:
        hidden: [..., (1 + n) H]: h, then the layers' outputs in ascending order.
        hidden_size: H.
        fuse: the product with F, [..., n H] -> [..., H]; None where n is 0.
    """
    if fuse is None:
        return hidden
    return hidden[..., :hidden_size] + fuse(hidden[..., hidden_size:])
