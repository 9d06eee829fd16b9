# SPDX-License-Identifier: Apache-2.0
"""`heads/gated.py` on packed products, with states [s ; n(s)] in float32 (`gated_cell.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.engine.cpu.heads.gated_cell import PackedCell, PackedFirstState
from vllm_redrafter.engine.cpu.heads.packed_head import PackedHead
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import Pack
from vllm_redrafter.heads.norm import normed


class PackedGatedHead(PackedHead):
    def __init__(self, head: GatedHead, pack: Pack) -> None:
        super().__init__(head, pack)
        self._first_state = PackedFirstState(head.config.hidden_size, head.fuse, pack)
        self._cell = PackedCell(head.cell, pack)
        blocks: Iterable[Any] = head.blocks
        self._blocks = [pack(block.weight, block.bias) for block in blocks]
        self._dtype, self._scale = head.scale.dtype, head.scale.float()

    def condition(self, hidden: Tensor) -> Tensor:
        return self._first_state(hidden)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        return self._cell(condition, embedded)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        return self._cell(state, embedded)

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        plain, unit = state.chunk(2, dim=-1)
        for block in self._blocks:
            plain = plain + F.silu(block(unit.to(self._dtype)).float())
            unit = normed(plain)
        return (unit * self._scale).to(self._dtype)
