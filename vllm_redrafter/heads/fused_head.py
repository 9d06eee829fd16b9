"""A head in few launches: what `engine/cuda/draft_search.py` asks of a head on a GPU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """`DraftHead.features`, of condition [R, C] and state [R * beams, S].

        Returns:
            [R * beams, E]; [R, E] of a head that sees no drafted token.
        """
        ...
