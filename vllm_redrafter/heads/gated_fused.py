"""The gated head in few launches, for few rows on a GPU: `gated.py`, on kernels.

The cell and the last norm are one launch each (`gated_layer.py`), and so is each residual block
(`draft_layers.py`).
"""

from __future__ import annotations

from torch import Tensor, nn

from vllm_redrafter.heads.fused_head import Features, token_rows
from vllm_redrafter.heads.gated_layers import GatedLayers
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.heads.selector_fused import FusedSelector
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell


class FusedGatedHead:
    """See `FusedHead`. Weights are read where the layers have them at each call."""

    def __init__(
        self,
        layers: GatedLayers,
        table: nn.Module | None,
        max_rows: int,
        selector: FusedSelector | None,
    ) -> None:
        """Allocate what the layers write; see `DraftHead.launches`."""
        self._layers, self._table, self._selector = layers, table, selector
        # A layer reads one of the two and writes the other.
        self._states = layers.scale.new_empty(2, max_rows, len(layers.scale))
        self._features = layers.scale.new_empty(2, max_rows, len(layers.scale))
        self._next = 0

    def step(
        self,
        condition: Tensor,
        state: Tensor | None,
        tokens: Tensor,
        parents: Tensor,
        embedded: Tensor | None,
    ) -> Tensor:
        """z s_{t-1} + (1 - z) SiLU(x), from s_0 = c at the root: see `FusedHead.step`."""
        read = token_rows(self._table, tokens, embedded)
        self._next = 0 if state is None else 1 - self._next
        cell = self._layers.cell
        return gated_cell(
            read,
            Rows(condition) if state is None else Rows(state, parents),
            cell.weight,
            cell.bias,
            self._states[self._next, : tokens.shape[0]],
            EPSILON,
        )

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Features:
        """Residual blocks, and the last norm to come: see `FusedHead.features`."""
        first, second = self._features[:, : state.shape[0]]
        x = state
        for block in self._layers.blocks:
            product, bias = Product(x, block.weight), block.bias
            x = draft_layer(product, first, bias=bias, silu=True, residual=x, epsilon=EPSILON)
            first, second = second, first
        return Features(x, self._layers.scale)

    def base_features(self, condition: Tensor, state: Tensor) -> Tensor:
        """What the selector tells: see `FusedTellingHead.base_features`."""
        assert self._selector is not None
        return self._selector(self.features(condition, state, 0).made())
