# SPDX-License-Identifier: Apache-2.0
"""Orders of K and V in a block of a CPU's KV cache, those of other processors among them."""

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_redrafter.engine.cpu import cache_layout as cache_layout_module
from vllm_redrafter.engine.cpu.cache_layout import CacheLayout, cache_layout


@dataclass(frozen=True)
class Tiles:
    """[B, head size] of K or V in another order of split dimensions, those of tokens first."""

    tokens: tuple[int, ...]
    entries: tuple[int, ...]
    order: tuple[int, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., B, head size] to [..., B * head size]."""
        *before, block_size, head_size = rows.shape
        split = (block_size // prod(self.tokens), *self.tokens)
        split += (head_size // prod(self.entries), *self.entries)
        tiled = rows.reshape(*before, *split)
        dims = [len(before) + dim for dim in self.order]
        return tiled.permute(*range(len(before)), *dims).reshape(*before, -1)


ORDERS = {
    "vector": (Tiles((), (), (1, 0)), Tiles((), (), (0, 1))),
    "AMX": (Tiles((16,), (2,), (0, 2, 1, 3)), Tiles((2,), (16,), (2, 0, 3, 1))),
    "BFMMLA": (Tiles((4, 2), (4,), (0, 3, 1, 2, 4)), Tiles((4,), (2,), (2, 0, 3, 1))),
    "later BFMMLA": (Tiles((4, 2), (4,), (0, 3, 1, 2, 4)), Tiles((4,), (4, 2), (2, 0, 3, 4, 1))),
    "made up": (Tiles((16,), (), (1, 0, 2)), Tiles((8,), (4,), (1, 3, 0, 2))),
}
"""K's and V's, as vLLM's sources have them for x86 without AMX, with it, and for ARM's BFMMLA in
two versions; the last one is nobody's."""


def lay_out(order: str, rows: Tensor) -> Tensor:
    """[2 (K, V), ..., B, head size] as a cache, [..., B, 2 * head size]."""
    *before, block_size, head_size = rows.shape[1:]
    halves = [tiles(half) for tiles, half in zip(ORDERS[order], rows, strict=True)]
    return torch.cat(halves, dim=-1).view(*before, block_size, 2 * head_size)


def layout_of(order: str, head_size: int, block_size: int, dtype: torch.dtype) -> CacheLayout:
    """What is found out where vLLM writes in this order."""
    keys, values = ORDERS[order]
    with pytest.MonkeyPatch.context() as patch:
        write_with(patch, keys, values)
        return cache_layout(order, head_size, block_size, dtype)


def write_with(patch: pytest.MonkeyPatch, keys: Any, values: Any) -> None:
    """Put [B, head size] -> B * head size numbers, of K and of V, in place of vLLM's writer."""

    def write(key: Tensor, value: Tensor, to_keys: Tensor, to_values: Tensor, *_: Any) -> None:
        to_keys.copy_(keys(key[:, 0]).view_as(to_keys))
        to_values.copy_(values(value[:, 0]).view_as(to_values))

    patch.setattr(cache_layout_module, "cpu_attn_reshape_and_cache", write)
