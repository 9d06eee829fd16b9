# SPDX-License-Identifier: Apache-2.0
"""The candidates of a draft: the tokens that its nodes below the root choose from."""

from typing import NamedTuple, Self

from torch import Tensor

from vllm_redrafter.config import FEWEST_CANDIDATES


class Shortlist(NamedTuple):
    """The candidates of R drafts of L levels, by one product with the vocabulary-wide layer.

    Attributes:
        root_logits: [R, 1, V], of the tokens that follow the roots.
        tokens: [R, L-1, C] int64, the C best draft tokens of each depth from 1 on, in any order.
        weight: [V, E], the vocabulary-wide layer's.
    """

    root_logits: Tensor
    tokens: Tensor
    weight: Tensor

    @classmethod
    def of(cls, logits: Tensor, weight: Tensor, count: int) -> Self:
        """The C best of each depth, of logits [R, L, V]; all where V is less."""
        tokens = logits[:, 1:].topk(min(count, logits.shape[-1]), dim=-1, sorted=False).indices
        return cls(logits[:, :1], tokens, weight)

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """[R, W, C] of the candidates of a depth from 1 on, of features [R, W, E] of its nodes."""
        rows = self.weight[self.tokens[:, depth - 1]]
        return features @ rows.transpose(-1, -2)


def affordable(count: int, requests: int, length: int, vocabulary: int) -> int:
    """C for a draft of R requests at once; 0 to rank the vocabulary at every level.

    R (L - 1) C gathered rows shall not exceed the V rows of the vocabulary-wide layer: C is halved,
    down to FEWEST_CANDIDATES. Where these are more than ranking the vocabulary reads, C is 0.
    """
    if length == 1:
        return 0
    below = requests * (length - 1)
    while count > FEWEST_CANDIDATES and below * count > vocabulary:
        count = max(count // 2, FEWEST_CANDIDATES)
    return count if requests * count <= vocabulary else 0
