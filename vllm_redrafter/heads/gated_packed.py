"""The gated head for few rows on a host: its products, and compiled loops between them.

The mathematics is that of `gated.py`. States are [s ; n(s)] in float32: see `gated_cell_packed.py`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.heads.gated_cell_packed import PackedCell, PackedFirstState
from vllm_redrafter.heads.gated_layers import GatedLayers
from vllm_redrafter.heads.head import DraftHead, Pack
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.heads.packed_head import PackedHead


class PackedGatedHead(PackedHead):
    """What a search asks of a `GatedHead`, whose methods these are.

    Args:
        head: whose `layers` these are.
        pack: makes the products.
    """

    def __init__(self, head: DraftHead, layers: GatedLayers, pack: Pack) -> None:
        super().__init__(head, pack)
        self._first_state = PackedFirstState(head.config.hidden_size, layers.fuse, pack)
        self._cell = PackedCell(layers.cell, pack)
        self._blocks = [pack(block.weight, block.bias) for block in layers.blocks]
        self._dtype, self._scale = layers.scale.dtype, layers.scale.float()

    def condition(self, hidden: Tensor) -> Tensor:
        """[..., 2 H] float32: the state before the root's; see `GatedHead.condition`."""
        return self._first_state(hidden)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        """See `advance`."""
        return self._cell(condition, embedded)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """[..., 2 H] float32; see `GatedHead.advance`."""
        return self._cell(state, embedded)

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """See `GatedHead.features`."""
        plain, unit = state.chunk(2, dim=-1)
        for block in self._blocks:
            plain = plain + F.silu(block(unit.to(self._dtype)).float())
            unit = normed(plain)
        return (unit * self._scale).to(self._dtype)
