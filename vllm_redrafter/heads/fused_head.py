# SPDX-License-Identifier: Apache-2.0
"""A head in few launches: what `engine/v2/draft_search.py` asks of a head on a GPU."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor


class Features(NamedTuple):
    """What the vocabulary-wide layer reads: x [rows, E], or a n(x) with the scale a [E]."""

    x: Tensor
    scale: Tensor | None = None


class Level(NamedTuple):
    """The tokens of a level of the search, and what they go on from."""

    condition: Tensor
    """[R, C]; the root's state may depend on it."""
    state: Tensor | None
    """[rows above, S], of the level above; None at the root."""
    embedded: tuple[Tensor, Tensor | None]
    """Their embeddings [rows, H] and None; or a table of such, and the tokens [rows] int64."""
    parents: Tensor
    """[rows] int32, the row of the level above that each one continues."""
    depth: int
    """0 at the root."""


class FusedHead(Protocol):
    """A head's layers, but the vocabulary-wide one, for the rows of a level: beams by request."""

    max_rows: int
    """Of a level; the head itself searches larger ones."""

    @property
    def selector(self) -> Callable[[Tensor], Tensor] | None:
        """The head's, of the roots' features: from [R, E] to [L, R, E]. None: it has no form."""
        ...

    def step(self, level: Level) -> Tensor:
        """The states [rows, S] after its tokens; the call after the next writes over them."""
        ...

    def features(self, condition: Tensor, state: Tensor) -> Features:
        """`DraftHead.features` of R * beams rows."""
        ...
