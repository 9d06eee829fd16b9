# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads in few launches, for few requests on a GPU: `heads/medusa.py`, on kernels.

A residual block is one launch (`draft_layers.py`), of a row per request; no state is computed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllm_redrafter.heads.fused_head import Features
from vllm_redrafter.heads.medusa import MedusaHead
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer


class FusedMedusaHead:
    """A `FusedHead`. Weights are read where the head has them at each call."""

    def __init__(
        self, head: MedusaHead, table: nn.Module | None, max_rows: int, length: int
    ) -> None:
        self._blocks: Any = head.blocks
        weight = head.vocabulary_layers[0].weight
        # A layer reads one of the two and writes the other.
        self._features = weight.new_empty(2, max_rows, weight.shape[1])
        self._nothing = weight.new_zeros(max_rows, 1)

    def step(
        self,
        condition: Tensor,
        state: Tensor | None,
        tokens: Tensor,
        parents: Tensor,
        embedded: Tensor | None,
    ) -> Tensor:
        """[rows, 1], which nothing reads."""
        return self._nothing[: tokens.shape[0]]

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Features:
        """[R, H], for all beams."""
        x = condition
        for index, layer in enumerate(self._blocks[depth].layers):
            out = self._features[index % 2, : x.shape[0]]
            x = draft_layer(Product(x, layer.weight), out, bias=layer.bias, silu=True, residual=x)
        return Features(x)
