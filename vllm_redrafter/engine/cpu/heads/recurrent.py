# SPDX-License-Identifier: Apache-2.0
"""`heads/recurrent.py` in as few packed products as its mathematics allows.

s_t = SiLU([W_w W_u] [e(x_t) ; s_{t-1}] + b_u) is one product, and of the head, only what depends
on s_t is computed at every level.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.engine.cpu.heads.packed_head import PackedHead
from vllm_redrafter.heads.fusion import fused
from vllm_redrafter.heads.head import Pack
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead


class PackedRecurrentHead(PackedHead):
    config: RecurrentConfig

    def __init__(self, head: RecurrentHead, pack: Pack) -> None:
        super().__init__(head, pack)
        hidden = self.config.hidden_size
        if self.config.rnn:
            both = torch.cat([head.rnn_w.weight, head.rnn_u.weight], dim=1)
            self._cell = pack(both, head.rnn_u.bias)
        self._fuse = None if head.fuse is None else pack(head.fuse.weight, None)
        if self.config.has_input_projection:
            projection = head.input_proj.weight
            self._project_hidden = pack(projection[:, :hidden], head.input_proj.bias)
            self._project_state = pack(projection[:, hidden:], None)
        self._blocks = [pack(block.weight, block.bias) for block in head.blocks]

    def condition(self, hidden: Tensor) -> Tensor:
        hidden = fused(hidden, self.config.hidden_size, self._fuse)
        return self._project_hidden(hidden) if self.config.has_input_projection else hidden

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        if not self.config.rnn:
            return embedded
        return self.advance(torch.zeros_like(embedded), embedded, 0)

    def advance(self, state: Tensor, embedded: Tensor, depth: int) -> Tensor:
        if not self.config.rnn:
            return state + embedded
        return F.silu(self._cell(torch.cat([embedded, state], dim=-1)), inplace=True)

    def features(self, condition: Tensor, state: Tensor) -> Tensor:
        if self.config.has_input_projection:
            x = self._project_state(state).add_(condition)
        else:
            x = torch.cat([condition.expand_as(state), state], dim=-1)
        for block in self._blocks:
            x = F.silu(block(x), inplace=True).add_(x)
        return x
