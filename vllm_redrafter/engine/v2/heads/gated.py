# SPDX-License-Identifier: Apache-2.0
"""The gated head in few launches, for few rows on a GPU: `heads/gated.py`, on kernels.

With V and the search's three, a level is six launches and one per block; four and one per block
where it ranks candidates.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from vllm_redrafter.engine.v2.heads.selector import FusedSelector
from vllm_redrafter.heads.fused_head import Features, Level
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS, Product, draft_layer
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell


class FusedGatedHead:
    """A `FusedHead`. Weights are read where the head has them at each call."""

    def __init__(self, head: GatedHead, max_rows: int, length: int) -> None:
        self._head = head
        self.max_rows = max_rows = min(max_rows, MAX_ROWS)
        self.selector = FusedSelector.of(head.selector, length, max_rows)
        # A layer reads one of the two and writes the other.
        self._states = head.scale.new_empty(2, max_rows, len(head.scale))
        self._features = head.scale.new_empty(2, max_rows, len(head.scale))

    def step(self, level: Level) -> Tensor:
        """z s_{t-1} + (1 - z) SiLU(x), from s_0 = c at the root."""
        cell, above = self._head.cell, level.state
        return gated_cell(
            Rows(*level.embedded),
            Rows(level.condition) if above is None else Rows(above, level.parents),
            cell.weight,
            cell.bias,
            self._states[level.depth % 2, : len(level.parents)],
            EPSILON,
        )

    def features(self, condition: Tensor, state: Tensor) -> Features:
        """Residual blocks; the last norm is left to the reader."""
        first, second = self._features[:, : state.shape[0]]
        blocks: Iterable[Any] = self._head.blocks
        x = state
        for block in blocks:
            product, bias = Product(x, block.weight), block.bias
            x = draft_layer(product, first, bias=bias, silu=True, residual=x, epsilon=EPSILON)
            first, second = second, first
        return Features(x, self._head.scale)
