# SPDX-License-Identifier: Apache-2.0
"""The candidates of a draft: the tokens that its nodes below the root choose from."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from vllm_redrafter.config import FEWEST_CANDIDATES


class Shortlist(NamedTuple):
    """What one product with the vocabulary-wide layer tells of R drafts of L levels.

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
        """The best of each depth.

        Args:
            logits: [R, L, V], of all depths.
            weight: [V, E], the vocabulary-wide layer's.
            count: C, or V where that is less.
        """
        tokens = logits[:, 1:].topk(min(count, logits.shape[-1]), dim=-1, sorted=False).indices
        return cls(logits[:, :1], tokens, weight)

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """[R, W, C] of the candidates of a depth from 1 on, of features [R, W, E] of its nodes."""
        rows = self.weight[self.tokens[:, depth - 1]]
        return features @ rows.transpose(-1, -2)


def affordable(count: int, requests: int, length: int, vocabulary: int) -> int:
    """How many candidates an engine's draft chooses from, for so many requests at once.

    Every request gathers (L - 1) C rows of its own, and the vocabulary-wide layer is V rows for
    all of them: where the former are more, C is halved until they are not. Where even
    FEWEST_CANDIDATES are more than ranking the vocabulary at every level, none are.

    Args:
        count: C, as it was asked for; 0 for none.
        requests: R.
        length: L.
        vocabulary: V, the draft tokens of this process.

    Returns:
        C, or 0: rank the vocabulary at every level.
    """
    if length == 1:
        return 0
    below = requests * (length - 1)
    while count > FEWEST_CANDIDATES and below * count > vocabulary:
        count = max(count // 2, FEWEST_CANDIDATES)
    return count if requests * count <= vocabulary else 0
