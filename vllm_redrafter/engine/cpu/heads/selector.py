# SPDX-License-Identifier: Apache-2.0
"""A selector on packed products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.heads.head import Pack
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.heads.selector import Selector


class PackedSelector:
    """See `Selector`, of which it keeps no tensor."""

    def __init__(self, selector: Selector, pack: Pack) -> None:
        self._depths, self._dtype = selector.sizes.depths, selector.up.dtype
        self._down = pack(selector.down.weight, selector.down.bias)
        self._ups = [pack(up, None) for up in selector.up]

    def __call__(self, x: Tensor, length: int) -> Tensor:
        """See `Selector.forward`; x may be wider than the products' dtype."""
        inner = F.silu(self._down(normed(x).to(self._dtype)))
        parts = inner.chunk(self._depths, dim=-1)[: length - 1]
        below = [x + up(part) for up, part in zip(self._ups, parts, strict=False)]
        return torch.stack([x, *below], dim=-2)
