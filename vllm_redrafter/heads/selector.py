# SPDX-License-Identifier: Apache-2.0
"""Which tokens may be drafted at each depth, told from the root alone.

A search ranks the vocabulary at the root, and at every node below it. What it finds there differs
from what the root's state could have guessed in order more than in kind, so that one product with
the vocabulary-wide layer, for all depths at once, can choose candidates, and each node then ranks
these alone. With x what is known at the root, and rank k:

    x_0 = x,  x_d = x + Up_d SiLU(Down_d n(x) + b_d)        n: `norm.py`

Of any head x may be the features at the root, so that x_d are features like those of a node of
depth d whose path nobody knows. `train --add-selector` adds such a one to a trained drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import MAX_NODES, require_at_most, require_positive
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.utils.errors import ConfigError

OWNER = "drafter config.json: selector"


@dataclass(frozen=True)
class SelectorConfig:
    """The sizes of a selector.

    Attributes:
        depths: D, below the root.
        rank: k, of each depth's change.

    Raises:
        ConfigError: a size is below 1, absurdly large or not an integer.
    """

    depths: int
    rank: int

    def __post_init__(self) -> None:
        require_positive(OWNER, depths=self.depths, rank=self.rank)
        require_at_most(OWNER, MAX_NODES, depths=self.depths)
        require_at_most(OWNER, 2**20, rank=self.rank)

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Of an entry of config.json, which may lack.

        Raises:
            ConfigError: it is no such entry.
        """
        if value is None or isinstance(value, cls):
            return value
        names = {f.name for f in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise ConfigError(f"{OWNER} must be an object with depths and rank, got {value!r}")
        return cls(**value)


class Selector(nn.Module):
    """The changes Down_d, b_d and Up_d of all depths.

    Args:
        width: E.
        sizes: D and k.
    """

    def __init__(self, width: int, sizes: SelectorConfig) -> None:
        super().__init__()
        self.sizes = sizes
        self.down = nn.Linear(width, sizes.depths * sizes.rank)
        # A new one guesses for every depth what it knows of the root.
        self.up = nn.Parameter(torch.zeros(sizes.depths, width, sizes.rank))

    def forward(self, x: Tensor, length: int) -> Tensor:
        """x_0 .. x_{length-1}: [..., length, E] of x [..., E]; `length` is at most D + 1."""
        inner = self._inner(x)[..., : length - 1, :]
        changes = torch.einsum("...dk,dek->...de", inner, self.up[: length - 1])
        return torch.cat([x.unsqueeze(-2), x.unsqueeze(-2) + changes.to(x.dtype)], dim=-2)

    def _inner(self, x: Tensor) -> Tensor:
        inner = F.silu(self.down(normed(x)))
        return inner.view(*inner.shape[:-1], self.sizes.depths, self.sizes.rank)
