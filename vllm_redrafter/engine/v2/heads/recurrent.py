# SPDX-License-Identifier: Apache-2.0
"""Apple's head in few launches, for few rows on a GPU: `heads/recurrent.py`, on kernels.

The state, the input projection and each residual block are one launch each (`draft_layers.py`).
"""

import torch
from torch import Tensor

from vllm_redrafter.engine.v2.heads.selector import FusedSelector
from vllm_redrafter.heads.fused_head import Features, Level
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS, Product, draft_layer


class FusedRecurrentHead:
    """A `FusedHead` of a head with an RNN. Weights are read where it has them at each call."""

    def __init__(self, head: RecurrentHead, max_rows: int, length: int) -> None:
        self._head = head
        self.max_rows = max_rows = min(max_rows, MAX_ROWS)
        self.selector = FusedSelector.of(head.selector, length, max_rows)
        weight, config = head.vocabulary_layer.weight, head.config
        # A layer reads one of the two and writes the other.
        self._states = weight.new_empty(2, max_rows, config.hidden_size)
        self._features = weight.new_empty(2, max_rows, config.exit_dim)

    def step(self, level: Level) -> Tensor:
        """SiLU(W_w e(x_t) + W_u s_{t-1} + b_u)."""
        recurrent, (x, tokens), above = self._head.rnn_u, level.embedded, level.state
        return draft_layer(
            Product(x, self._head.rnn_w.weight, tokens),
            self._states[level.depth % 2, : len(level.parents)],
            second=None if above is None else Product(above, recurrent.weight, level.parents),
            bias=recurrent.bias,
            silu=True,
        )

    def features(self, condition: Tensor, state: Tensor) -> Features:
        head, rows = self._head, state.shape[0]
        hidden = head.config.hidden_size
        if head.config.has_input_projection:
            weight = head.input_proj.weight[:, hidden:]
            x = draft_layer(Product(state, weight), self._features[0, :rows], addend=condition)
        else:
            by_request = state.view(condition.shape[0], -1, hidden)
            every = condition.unsqueeze(1).expand_as(by_request)
            x = torch.cat([every, by_request], dim=-1).flatten(0, 1)
        for index, linear in enumerate(head.blocks):
            out = self._features[(index + 1) % 2, :rows]
            x = draft_layer(Product(x, linear.weight), out, bias=linear.bias, silu=True, residual=x)
        return Features(x)
