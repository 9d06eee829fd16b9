# SPDX-License-Identifier: Apache-2.0
"""A head in few launches: what `engine/v2/draft_search.py` asks of a head on a GPU."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Features(NamedTuple):
    """What the vocabulary-wide layer reads: x [rows, E], or a n(x) with the scale a [E]."""

    x: Tensor
    scale: Tensor | None = None


class FusedHead(Protocol):
    """A head's layers, but the vocabulary-wide one, for the rows of a level: beams by request."""

    max_rows: int
    """Of a level; the head itself searches larger ones."""

    def step(
        self,
        condition: Tensor,
        state: Tensor | None,
        embedded: tuple[Tensor, Tensor | None],
        parents: Tensor,
        depth: int,
    ) -> Tensor:
        """The states [rows, S] after some tokens; the call after the next writes over them.

        Args:
            condition: [R, C]; the root's state may depend on it.
            state: [rows above, S], of the level above; None at the root.
            embedded: the tokens' embeddings [rows, H] and None; or a table of embeddings, and the
                tokens [rows] int64.
            parents: [rows] int32, the row of the level above that each one continues.
            depth: of the tokens; 0 at the root.
        """
        ...

    def features(self, condition: Tensor, state: Tensor) -> Features:
        """`DraftHead.features` of R * beams rows."""
        ...


@runtime_checkable
class FusedSelectorHead(FusedHead, Protocol):
    """One with a selector."""

    def base_features(self, condition: Tensor, state: Tensor) -> Tensor:
        """[L, R, E], `DraftHead.base_features` of the roots' condition [R, C] and state [R, S]."""
        ...
