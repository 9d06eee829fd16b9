# SPDX-License-Identifier: Apache-2.0
"""`heads/gated.py` for few rows on a host: packed products between compiled loops.

The loops compute in float32, whatever the products' dtype is. A state is [s ; n(s)], as both the
next cell and other products read n(s).
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.engine.cpu.heads.packed_head import PackedHead
from vllm_redrafter.heads.fusion import EPSILON as LAYER_EPSILON
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import Pack
from vllm_redrafter.heads.norm import EPSILON, normed
from vllm_redrafter.utils.compiled import Array, compiled


class PackedGatedHead(PackedHead):
    def __init__(self, head: GatedHead, pack: Pack) -> None:
        super().__init__(head, pack)
        self._first_state = _FirstState(head.config.hidden_size, head.fuse, pack)
        self._cell = _Cell(head.cell, pack)
        blocks: Iterable[Any] = head.blocks
        self._blocks = [pack(block.weight, block.bias) for block in blocks]
        self._dtype, self._scale = head.scale.dtype, head.scale.float()

    def condition(self, hidden: Tensor) -> Tensor:
        return self._first_state(hidden)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        return self._cell(condition, embedded)

    def advance(self, state: Tensor, embedded: Tensor, depth: int) -> Tensor:
        return self._cell(state, embedded)

    def features(self, condition: Tensor, state: Tensor) -> Tensor:
        plain, unit = state.chunk(2, dim=-1)
        for block in self._blocks:
            plain = plain + F.silu(block(unit.to(self._dtype)).float())
            unit = normed(plain)
        return (unit * self._scale).to(self._dtype)


class _FirstState:
    """The state before the root's: h, with what is fused of further layers (`fusion.py`)."""

    def __init__(self, hidden_size: int, fuse: nn.Linear | None, pack: Pack) -> None:
        self._size = hidden_size
        self._fuse = None if fuse is None else pack(fuse.weight, None)
        self._dtype = None if fuse is None else fuse.weight.dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., 2 H] float32, of hidden states [..., (1 + n) H]."""
        state = hidden[..., : self._size].float()
        if self._fuse is not None:
            rows = hidden.flatten(0, -2).float().numpy()
            layers = torch.from_numpy(_normed_layers(rows, self._size)).to(self._dtype)
            state = state + self._fuse(layers).float().view_as(state)
        both = torch.from_numpy(_with_norm(state.flatten(0, -2).numpy()))
        return both.view(*state.shape[:-1], -1)


class _Cell:
    """z s + (1 - z) SiLU(x) with z = sigmoid(g), of [g ; x] = W [n(e) ; n(s)] + b."""

    def __init__(self, layer: nn.Linear, pack: Pack) -> None:
        self._product, self._dtype = pack(layer.weight, layer.bias), layer.weight.dtype

    def __call__(self, state: Tensor, embedded: Tensor) -> Tensor:
        """The state [..., 2 H] float32 behind `state` [..., 2 H], of e [..., H]."""
        before = state.flatten(0, -2).contiguous().numpy()
        joined = _joined(embedded.flatten(0, -2).float().numpy(), before)
        mixed = self._product(torch.from_numpy(joined).to(self._dtype)).float()
        after = _after(before, mixed.numpy(), mixed.sigmoid().numpy())
        return torch.from_numpy(after).view(state.shape)


@compiled
def _normed_layers(hidden: Array, size: int) -> Array:
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
def _with_norm(state: Array) -> Array:
    """[s ; n(s)] [N, 2 H], of s [N, H]."""
    rows, size = state.shape
    both = np.empty((rows, 2 * size), dtype=state.dtype)
    for row in range(rows):
        factor = _norm_factor(state[row])
        for i in range(size):
            both[row, i] = state[row, i]
            both[row, size + i] = state[row, i] * factor
    return both


@compiled
def _joined(embedded: Array, state: Array) -> Array:
    """[n(e) ; n(s)] [N, 2 H], of e [N, H] and [s ; n(s)] [N, 2 H]."""
    rows, size = embedded.shape
    joined = np.empty_like(state)
    for row in range(rows):
        factor = _norm_factor(embedded[row])
        for i in range(size):
            joined[row, i] = embedded[row, i] * factor
        joined[row, size:] = state[row, size:]
    return joined


@compiled
def _after(before: Array, mixed: Array, sigmoids: Array) -> Array:
    """[s ; n(s)] [N, 2 H] behind [s' ; n(s')], of [g ; x] and their sigmoids, [N, 2 H] each."""
    rows, size = before.shape[0], before.shape[1] // 2
    after = np.empty_like(before)
    for row in range(rows):
        state = after[row, :size]
        for i in range(size):
            candidate = mixed[row, size + i] * sigmoids[row, size + i]
            state[i] = candidate + sigmoids[row, i] * (before[row, i] - candidate)
        factor = _norm_factor(state)
        for i in range(size):
            after[row, size + i] = state[i] * factor
    return after


@compiled
def _norm_factor(x: Array) -> Any:
    """n(x) / x: sqrt(H) / (|x| + EPSILON)."""
    return x.dtype.type(math.sqrt(x.shape[0]) / (math.sqrt(_square(x)) + EPSILON))


# In any order, so that vector instructions can add up.
@partial(compiled, fastmath={"reassoc"})
def _square(x: Array) -> Any:
    """|x|^2."""
    square = x.dtype.type(0.0)
    for value in x:
        square += value * value
    return square
