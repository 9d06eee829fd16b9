# SPDX-License-Identifier: Apache-2.0
"""Ropes that take a position for each token.

MLX's rope takes one offset for each row of a batch, and counts on from it. Nodes of a tree are
tokens of one row, so they are made rows of a batch while the rope turns them.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_redrafter.mlx.taps import derive


def take_positions(model: nn.Module) -> None:
    """Let every rope of a model take the positions [N] of its tokens as `offset`.

    Called in any other way it does what it did.
    """
    for module in model.modules():
        if _is_rope(module):
            derive(module, _PositionedRope)


def _is_rope(module: nn.Module) -> bool:
    """Is it a module without modules in it that is called with an offset?"""
    parameters = inspect.signature(type(module).__call__).parameters
    return "offset" in parameters and not module.children()


class _PositionedRope(nn.Module):
    def __call__(
        self, x: mx.array, offset: int | mx.array = 0, *args: Any, **kwargs: Any
    ) -> mx.array:
        if not isinstance(offset, mx.array) or offset.size == 1 or x.shape[0] > 1:
            return super().__call__(x, offset, *args, **kwargs)
        rows = x.swapaxes(0, -2)  # [1, heads, N, size] to [N, heads, 1, size]
        return super().__call__(rows, offset, *args, **kwargs).swapaxes(0, -2)
