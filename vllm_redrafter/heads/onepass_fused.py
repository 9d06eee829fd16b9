"""The onepass head in few launches, for few rows on a GPU: `onepass.py`, on kernels.

The root is six launches: the cell, A, the selector's three (`selector_fused.py`) and a n(g_d) of
all depths. A node below is two: the small state's cell (`gated_layer.py`), and what it changes of
what the root told (`correction.py`).
"""

from __future__ import annotations

from torch import Tensor, nn

from vllm_redrafter.heads.fused_head import Features, token_rows
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.heads.onepass_layers import OnePassLayers
from vllm_redrafter.heads.selector_fused import FusedSelector
from vllm_redrafter.triton_kernels.correction import correct
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell


class FusedOnePassHead:
    """See `FusedHead`. Weights are read where the layers have them at each call.

    A root's state is [s ; u]; below it is u alone, for s does not change.
    """

    def __init__(
        self, layers: OnePassLayers, table: nn.Module | None, max_rows: int, length: int
    ) -> None:
        """Allocate what the layers write; see `DraftHead.launches`."""
        self._layers, self._table = layers, table
        hidden, small = layers.first.in_features, layers.first.out_features
        self._roots = layers.scale.new_empty(max_rows, hidden + small)
        # A cell reads one of the two and writes the other.
        self._states = layers.scale.new_empty(2, max_rows, small)
        self._corrected = layers.scale.new_empty(max_rows, hidden)
        self._selector = FusedSelector(layers.base, length, max_rows)
        self._next = 0

    def step(
        self,
        condition: Tensor,
        state: Tensor | None,
        tokens: Tensor,
        parents: Tensor,
        embedded: Tensor | None,
    ) -> Tensor:
        """[s ; u] at the root, where all depths are told of; u below: see `FusedHead.step`."""
        read = token_rows(self._table, tokens, embedded)
        if state is None:
            return self._start(condition, read, tokens.shape[0])
        self._next = 1 - self._next
        out, mix = self._states[self._next, : tokens.shape[0]], self._layers.mix
        before = Rows(state[:, -out.shape[1] :], parents)
        return gated_cell(read, before, mix.weight, mix.bias, out, EPSILON)

    def _start(self, condition: Tensor, read: Rows, requests: int) -> Tensor:
        layers, both = self._layers, self._roots[:requests]
        root, small = both.tensor_split([layers.first.in_features], dim=1)
        gated_cell(read, Rows(condition), layers.cell.weight, layers.cell.bias, root, EPSILON)
        first = Product(root, layers.first.weight)
        draft_layer(first, small, bias=layers.first.bias, epsilon=EPSILON)
        self._selector(root)
        return both

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Features:
        """a n(y): see `FusedHead.features`."""
        layers, told = self._layers, self._selector.told(condition.shape[0])[depth]
        if depth == 0:
            return Features(told, layers.scale)
        change, out = layers.change, self._corrected[: state.shape[0]]
        return Features(correct(state, change.weight, change.bias, told, out), layers.scale)

    def base_features(self, condition: Tensor, state: Tensor) -> Tensor:
        """a n(g_d): see `FusedTellingHead.base_features`."""
        told = self._selector.told(condition.shape[0])
        return Features(told.flatten(0, 1), self._layers.scale).made().view_as(told)
