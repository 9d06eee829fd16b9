# SPDX-License-Identifier: Apache-2.0
"""Which tokens may be drafted at each depth, selected from the root alone.

One product with the vocabulary-wide layer, for all depths at once, chooses candidates, and each
node below the root ranks these alone. With x the head's features at the root, and rank k:

    x_0 = x,  x_d = x + Up_d SiLU(Down_d n(x) + b_d)        n: `norm.py`

`train --add-selector` adds a selector to a trained drafter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import MAX_NODES, require_integers
from vllm_redrafter.heads.norm import normed

OWNER = "drafter config.json: selector"


@dataclass(frozen=True)
class SelectorConfig:
    """The sizes of a selector: D depths below the root, and the rank k of each one's change."""

    depths: int
    rank: int

    def __post_init__(self) -> None:
        require_integers(OWNER, MAX_NODES, depths=self.depths)
        require_integers(OWNER, 2**20, rank=self.rank)


class Selector(nn.Module):
    """The changes Down_d, b_d and Up_d of all depths, of features [..., E]."""

    def __init__(self, width: int, sizes: SelectorConfig) -> None:
        super().__init__()
        self.sizes = sizes
        self.down = nn.Linear(width, sizes.depths * sizes.rank)
        # A new one has the root's features at every depth.
        self.up = nn.Parameter(torch.zeros(sizes.depths, width, sizes.rank))

    def forward(self, x: Tensor, length: int) -> Tensor:
        """x_0 .. x_{length-1}: [..., length, E] of x [..., E]; `length` is at most D + 1."""
        inner = F.silu(self.down(normed(x)))
        inner = inner.view(*inner.shape[:-1], self.sizes.depths, self.sizes.rank)
        inner = inner[..., : length - 1, :]
        changes = torch.einsum("...dk,dek->...de", inner, self.up[: length - 1])
        return torch.cat([x.unsqueeze(-2), x.unsqueeze(-2) + changes.to(x.dtype)], dim=-2)
