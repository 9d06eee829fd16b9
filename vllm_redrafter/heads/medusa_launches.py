"""Medusa's heads in few launches, for few requests on a GPU: `medusa.py`, on kernels.

A residual block is one launch (`draft_layers.py`), of a row per request; no state is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer

if TYPE_CHECKING:
    from vllm_redrafter.heads.medusa import MedusaBlocks, MedusaHead


class MedusaLaunches:
    """See `HeadLaunches`. Weights are read where the head has them at each call."""

    def __init__(self, head: MedusaHead, max_rows: int) -> None:
        self._head = head
        weight = head.vocabulary_layers[0].weight
        # A layer reads one of the two and writes the other.
        self._features = weight.new_empty(2, max_rows, head.config.hidden_size)
        self._nothing = weight.new_zeros(max_rows, 1)

    def step(
        self,
        condition: Tensor,
        state: Tensor | None,
        tokens: Tensor,
        parents: Tensor,
        embedded: Tensor | None,
    ) -> Tensor:
        """[rows, 1], which nothing reads: see `HeadLaunches.step`."""
        return self._nothing[: tokens.shape[0]]

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """[R, H], for all beams: see `HeadLaunches.features`."""
        x = condition
        blocks = cast("MedusaBlocks", self._head.blocks[depth])
        for index, layer in enumerate(blocks.layers):
            out = self._features[index % 2, : x.shape[0]]
            x = draft_layer(Product(x, layer.weight), out, bias=layer.bias, silu=True, residual=x)
        return x
