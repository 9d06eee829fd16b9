"""The onepass head for few rows on a host: its products, and compiled loops between them.

The mathematics is that of `onepass.py`. A state at depth d is [g_d .. g_D ; u ; n(u)] in float32:
what the root tells of all depths is computed with the root's state, once per draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_redrafter.heads.gated_cell_packed import PackedCell, PackedFirstState, with_norm
from vllm_redrafter.heads.head import DraftHead, Pack
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.heads.onepass_layers import OnePassLayers
from vllm_redrafter.heads.packed_head import PackedHead
from vllm_redrafter.heads.selector_packed import PackedSelector


class PackedOnePassHead(PackedHead):
    """What a search asks of a `OnePassHead`, whose methods these are.

    Args:
        head: whose `layers` these are.
        pack: makes the products.
    """

    def __init__(self, head: DraftHead, layers: OnePassLayers, pack: Pack) -> None:
        super().__init__(head, pack)
        self._hidden, self._small = layers.first.in_features, layers.first.out_features
        self._first_state = PackedFirstState(self._hidden, layers.fuse, pack)
        self._cell = PackedCell(layers.cell, pack)
        self._base = PackedSelector(layers.base, pack)
        self._first = pack(layers.first.weight, layers.first.bias)
        self._mix = PackedCell(layers.mix, pack)
        self._change = pack(layers.change.weight, layers.change.bias)
        self._dtype, self._scale = layers.scale.dtype, layers.scale.float()

    def condition(self, hidden: Tensor) -> Tensor:
        """[..., 2 H] float32: the state before the root's; see `OnePassHead.condition`."""
        return self._first_state(hidden)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        """[s ; g_1 .. g_D ; u ; n(u)] float32; see `OnePassHead.start`."""
        root, unit = self._cell(condition, embedded).chunk(2, dim=-1)
        told = self._base(root, self.config.selected_depths + 1).flatten(-2)
        small = self._first(unit.to(self._dtype)).float()
        return torch.cat([told, with_norm(small)], dim=-1)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """[g_{d+1} .. g_D ; u ; n(u)] float32; see `OnePassHead.advance`."""
        told, small = self._parts(state)
        return torch.cat([told[..., self._hidden :], self._mix(small, embedded)], dim=-1)

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """[..., H]; see `OnePassHead.features`."""
        told, small = self._parts(state)
        told = told[..., : self._hidden]
        if depth > 0:
            corrections = self._change(small[..., : self._small].to(self._dtype)).float()
            kept, change = corrections.chunk(2, dim=-1)
            told = torch.addcmul(change, told, kept.sigmoid())
        return self._scaled(told)

    def base_features(self, condition: Tensor, state: Tensor, length: int) -> Tensor:
        """[..., length, H]; see `OnePassHead.base_features`."""
        told = state[..., : length * self._hidden]
        return self._scaled(told.view(*state.shape[:-1], length, self._hidden))

    def _parts(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the root told, and [u ; n(u)]."""
        return state[..., : -2 * self._small], state[..., -2 * self._small :]

    def _scaled(self, x: Tensor) -> Tensor:
        """a n(x), as the vocabulary-wide layer reads it."""
        return (normed(x) * self._scale).to(self._dtype)
