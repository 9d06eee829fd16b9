# SPDX-License-Identifier: Apache-2.0
"""A head in few launches: what `engine/cuda/draft_search.py` asks of a head on a GPU."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Features(NamedTuple):
    """What the vocabulary-wide layer reads: x, or a n(x) that is yet to be made.

    Attributes:
        x: [rows, E].
        scale: [E], a; None where x is read as it is.
    """

    x: Tensor
    scale: Tensor | None = None


class FusedHead(Protocol):
    """A head's layers for few rows; the vocabulary-wide one is none of them.

    Rows are those of a level: the beams of all requests, one request's after the other.
    """

    def step(
        self,
        condition: Tensor,
        state: Tensor | None,
        tokens: Tensor,
        parents: Tensor,
        embedded: Tensor | None,
    ) -> Tensor:
        """The states after some tokens.

        Args:
            condition: [R, C]; the root's state may depend on it.
            state: [rows above, S], of the level above; None at the root.
            tokens: [rows] int64.
            parents: [rows] int32, which of the level above each row continues.
            embedded: [rows, H], the tokens' embeddings; None where the head was given the table.

        Returns:
            [rows, S], in memory that the call after the next writes over.
        """
        ...

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Features:
        """`DraftHead.features`, of condition [R, C] and state [R * beams, S].

        Returns:
            Of R * beams rows; of R rows where the head sees no drafted token.
        """
        ...


@runtime_checkable
class FusedSelectorHead(FusedHead, Protocol):
    """One that tells candidates."""

    def base_features(self, condition: Tensor, state: Tensor) -> Tensor:
        """`DraftHead.base_features` of the roots, for all levels.

        Args:
            condition: [R, C].
            state: [R, S], of the roots.

        Returns:
            [L, R, E].
        """
        ...
