"""The gated head for few rows on a host: its products, and compiled loops between them.

The mathematics is that of `gated.py`. In calls of torch a cell is a dozen on a few thousand
numbers; here it is its product, a call and two loops. They compute in float32, whatever the
products' dtype is, and so states are float32.

A state is [s ; n(s)]: what the vocabulary-wide layer reads of it, the next cell reads as well.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.heads.fusion import EPSILON as LAYER_EPSILON
from vllm_redrafter.heads.gated_layers import GatedLayers
from vllm_redrafter.heads.head import HeadConfig, Pack
from vllm_redrafter.heads.norm import EPSILON, normed
from vllm_redrafter.utils.compiled import compiled, compiled_in_any_order

Floats = npt.NDArray[Any]


class PackedGatedHead:
    """What a search asks of a `GatedHead`, whose methods these are.

    Keeps none of the head's tensors but a and `d2t`: its weights are freed with the head.

    Args:
        config: the head's.
        layers: the head's.
        pack: makes the products.
        d2t: of a reduced draft vocabulary.
    """

    def __init__(
        self, config: HeadConfig, layers: GatedLayers, pack: Pack, d2t: Tensor | None
    ) -> None:
        self.config, self._d2t = config, d2t
        self._fuse = None if layers.fuse is None else pack(layers.fuse.weight, None)
        self._cell = pack(layers.cell.weight, layers.cell.bias)
        self._blocks = [pack(block.weight, block.bias) for block in layers.blocks]
        self._vocabulary_layer = pack(layers.vocabulary.weight, None)
        self._dtype, self._scale = layers.scale.dtype, layers.scale.float()

    def condition(self, hidden: Tensor) -> Tensor:
        """[..., 2 H] float32: the state before the root's; see `GatedHead.condition`."""
        size, rows = self.config.hidden_size, hidden.flatten(0, -2).float()
        before = rows[:, :size]
        if self._fuse is not None:
            layers = torch.from_numpy(_normed_layers(rows.numpy(), size))
            before = before + self._fuse(layers.to(self._dtype)).float()
        condition = torch.from_numpy(_with_norm(before.numpy()))
        return condition.view(*hidden.shape[:-1], 2 * size)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        """See `advance`."""
        return self.advance(condition, embedded)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """[..., 2 H] float32; see `GatedHead.advance`."""
        before = state.flatten(0, -2).numpy()
        joined = _joined(embedded.flatten(0, -2).float().numpy(), before)
        mixed = self._cell(torch.from_numpy(joined).to(self._dtype)).float()
        after = _after(before, mixed.numpy(), mixed.sigmoid().numpy())
        return torch.from_numpy(after).view(state.shape)

    def logits(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """See `DraftHead.logits`."""
        plain, unit = state.chunk(2, dim=-1)
        for block in self._blocks:
            plain = plain + F.silu(block(unit.to(self._dtype)).float())
            unit = normed(plain)
        return self._vocabulary_layer((unit * self._scale).to(self._dtype))

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """See `DraftHead.target_tokens`."""
        return draft_tokens if self._d2t is None else draft_tokens + self._d2t[draft_tokens]


@compiled
def _normed_layers(hidden: Floats, size: int) -> Floats:
    """[N, m H], of h and m layers' outputs [N, (1 + m) H]: the norm of `fusion.py`."""
    layers = np.empty_like(hidden[:, size:])
    for row in range(hidden.shape[0]):
        for start in range(size, hidden.shape[1], size):
            layer = hidden[row, start : start + size]
            factor = 1.0 / math.sqrt(_square(layer) / size + LAYER_EPSILON)
            for i in range(size):
                layers[row, start - size + i] = layer[i] * factor
    return layers


@compiled
def _with_norm(state: Floats) -> Floats:
    """[s ; n(s)] [N, 2 H], of s [N, H]."""
    rows, hidden = state.shape
    both = np.empty((rows, 2 * hidden), dtype=state.dtype)
    for row in range(rows):
        factor = _factor(state[row])
        for i in range(hidden):
            both[row, i] = state[row, i]
            both[row, hidden + i] = state[row, i] * factor
    return both


@compiled
def _joined(embedded: Floats, state: Floats) -> Floats:
    """[n(e) ; n(s)] [N, 2 H], of e [N, H] and [s ; n(s)] [N, 2 H]."""
    rows, hidden = embedded.shape
    joined = np.empty_like(state)
    for row in range(rows):
        factor = _factor(embedded[row])
        for i in range(hidden):
            joined[row, i] = embedded[row, i] * factor
            joined[row, hidden + i] = state[row, hidden + i]
    return joined


@compiled
def _after(before: Floats, mixed: Floats, sigmoids: Floats) -> Floats:
    """[s ; n(s)] [N, 2 H] behind [s' ; n(s')], of [g ; x] and their sigmoids, [N, 2 H] each."""
    rows, hidden = before.shape[0], before.shape[1] // 2
    after = np.empty_like(before)
    for row in range(rows):
        state = after[row, :hidden]
        for i in range(hidden):
            candidate = mixed[row, hidden + i] * sigmoids[row, hidden + i]
            state[i] = candidate + sigmoids[row, i] * (before[row, i] - candidate)
        factor = _factor(state)
        for i in range(hidden):
            after[row, hidden + i] = state[i] * factor
    return after


@compiled
def _factor(x: Floats) -> Any:
    """n(x) / x: sqrt(H) / (|x| + EPSILON)."""
    return x.dtype.type(math.sqrt(x.shape[0]) / (math.sqrt(_square(x)) + EPSILON))


@compiled_in_any_order
def _square(x: Floats) -> Any:
    """|x|^2."""
    square = x.dtype.type(0.0)
    for value in x:
        square += value * value
    return square
