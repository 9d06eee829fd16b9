"""The onepass head for few rows on a host: its products, and compiled loops between them.

The mathematics is that of `onepass.py`. A state at depth d is [g_d .. g_D ; u ; n(u)] in float32:
what the root tells of all depths is computed with the root's state, once per draft.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.heads.gated_cell_packed import (
    Floats,
    PackedCell,
    PackedFirstState,
    norm_factor,
    with_norm,
)
from vllm_redrafter.heads.head import DraftHead, Pack
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.heads.onepass_layers import OnePassLayers
from vllm_redrafter.heads.packed_head import PackedHead
from vllm_redrafter.heads.selector_packed import PackedSelector
from vllm_redrafter.utils.compiled import compiled


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
        self._dtype, self._scale = layers.scale.dtype, layers.scale.detach().float().numpy()

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
        small = self._mix(state[..., -2 * self._small :], embedded)
        return torch.cat([state[..., self._hidden : -2 * self._small], small], dim=-1)

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """[..., H]; see `OnePassHead.features`."""
        if depth == 0:
            return self._scaled(state[..., : self._hidden])
        rows = state.flatten(0, -2)
        small = rows[:, -2 * self._small : -self._small].to(self._dtype)
        mixed = self._change(small).float()
        corrected = _corrected(rows.numpy(), mixed.numpy(), mixed.sigmoid().numpy(), self._scale)
        return torch.from_numpy(corrected).to(self._dtype).view(*state.shape[:-1], -1)

    def base_features(self, condition: Tensor, state: Tensor, length: int) -> Tensor:
        """[..., length, H]; see `OnePassHead.base_features`."""
        told = state[..., : length * self._hidden]
        return self._scaled(told.view(*state.shape[:-1], length, self._hidden))

    def _scaled(self, x: Tensor) -> Tensor:
        """a n(x), as the vocabulary-wide layer reads it."""
        return (normed(x) * torch.from_numpy(self._scale)).to(self._dtype)


@compiled
def _corrected(state: Floats, mixed: Floats, sigmoids: Floats, scale: Floats) -> Floats:
    """a n(sigmoid(p) g_d + c) [N, H]; of states, [p ; c] and their sigmoids [N, 2 H], and a."""
    rows, hidden = state.shape[0], scale.shape[0]
    corrected = np.empty((rows, hidden), dtype=state.dtype)
    for row in range(rows):
        for i in range(hidden):
            corrected[row, i] = sigmoids[row, i] * state[row, i] + mixed[row, hidden + i]
        factor = norm_factor(corrected[row])
        for i in range(hidden):
            corrected[row, i] *= factor * scale[i]
    return corrected
