# SPDX-License-Identifier: Apache-2.0
"""A selector in few launches, for few rows on a GPU: `heads/selector.py`, on kernels.

Down of all depths is one launch, with its norm and SiLU (`draft_layers.py`), and so is Up.
"""

from typing import Self

import torch
from torch import Tensor

from vllm_redrafter.heads.fused_head import Features
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.heads.selector import Selector
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.gated_layer import scale_normed


class FusedSelector:
    """A selector of drafts of L levels, reading the weights at each call."""

    def __init__(self, selector: Selector, length: int, max_rows: int) -> None:
        self._selector, self._length = selector, length
        width = selector.up.shape[1]
        inner = (length - 1) * selector.sizes.rank
        self._inner = selector.up.new_empty(max_rows, inner)
        self._told = selector.up.new_empty(length * max_rows, width)

    @classmethod
    def of(cls, selector: Selector | None, length: int, max_rows: int) -> Self | None:
        """None without a selector, or for more levels than it selects for."""
        if selector is None or length > 1 + selector.sizes.depths:
            return None
        return cls(selector, length, max_rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x_0 .. x_{L-1}: [L, R, E] of x [R, E], in memory that the next call overwrites."""
        depths, rank = self._length - 1, self._selector.sizes.rank
        told = self._told[: self._length * len(x)].view(self._length, len(x), -1)
        told.copy_(x.expand_as(told))
        if not depths:
            return told
        down, up = self._selector.down, self._selector.up
        rows = depths * rank
        inner = draft_layer(
            Product(x, down.weight[:rows]),
            self._inner[: len(x)],
            bias=down.bias[:rows],
            silu=True,
            epsilon=EPSILON,
        )
        by_depth = inner.view(len(x), depths, rank).transpose(0, 1)
        told[1:].baddbmm_(by_depth, up[:depths].transpose(1, 2))
        return told


def finished(features: Features) -> Tensor:
    """[rows, E], with the norm applied that a form has left out."""
    x, scale = features
    return x if scale is None else scale_normed(x, scale, torch.empty_like(x), EPSILON)
