# SPDX-License-Identifier: Apache-2.0
"""The candidates of a draft on a host: chosen and ranked by compiled loops, which copy no rows."""

from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.heads.shortlist import Shortlist
from vllm_redrafter.utils.compiled import Array, compiled
from vllm_redrafter.utils.top_of_many import top_of_many

FLOAT32_BITS = {torch.float32: (torch.uint32, 0), torch.bfloat16: (torch.uint16, 16)}
"""What numbers are as integers, and how far these are shifted to be a float32's."""


class CompiledShortlist(Shortlist):
    """With float32 logits; candidates without a number for a logit are -1, their logits -inf."""

    @classmethod
    def of(cls, logits: Tensor, weight: Tensor, count: int) -> Self:
        logits = logits.float()
        tokens = _best_tokens(logits[:, 1:].numpy(), min(count, logits.shape[-1]))
        return cls(logits[:, :1], torch.from_numpy(tokens), weight)

    def logits(self, features: Tensor, depth: int) -> Tensor:
        if self.weight.dtype not in FLOAT32_BITS:
            return super().logits(features, depth).float()
        bits, shift = FLOAT32_BITS[self.weight.dtype]
        rows = self.weight.view(bits).numpy()
        tokens = self.tokens[:, depth - 1].numpy()
        return torch.from_numpy(
            _row_products(rows, np.uint32(shift), tokens, features.float().numpy())
        )


@compiled
def _best_tokens(logits: Array, count: int) -> Array:
    """[R, D, C] int64, the C best of logits [R, D, V]; -1 where there are fewer."""
    requests, depths = logits.shape[:2]
    tokens = np.empty((requests, depths, count), dtype=np.int64)
    values = np.empty(count, dtype=logits.dtype)
    for r in range(requests):
        for depth in range(depths):
            found = top_of_many(logits[r, depth], values, tokens[r, depth])
            tokens[r, depth, found:] = -1
    return tokens


@compiled
def _row_products(rows: Array, shift: Any, tokens: Array, features: Array) -> Array:
    """[R, W, C] float32, of features [R, W, E] and the rows of tokens [R, C]; -inf for token -1.

    Args:
        rows: [V, E], the bits of numbers that are float32 when they are shifted to the left.
        shift: by so many bits.
    """
    requests, width, size = features.shape
    products = np.full((requests, width, tokens.shape[1]), -np.inf, dtype=np.float32)
    bits = np.empty(size, dtype=np.uint32)
    # numba cannot read a bfloat16, which is a float32's upper half.
    row = bits.view(np.float32)
    for r in range(requests):
        for at, token in enumerate(tokens[r]):
            if token >= 0:
                for i in range(size):
                    bits[i] = np.uint32(rows[token, i]) << shift
                for beam in range(width):
                    products[r, beam, at] = _product(row, features[r, beam])
    return products


# In any order, so that vector instructions can add up.
@partial(compiled, fastmath={"reassoc"})
def _product(a: Array, b: Array) -> Any:
    """The inner product of two vectors."""
    total = a.dtype.type(0.0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total
