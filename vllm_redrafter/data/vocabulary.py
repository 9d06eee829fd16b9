# SPDX-License-Identifier: Apache-2.0
"""Tokens that a target has no embedding of: an engine that is sent one dies of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EmbeddedTokens:
    """The tokens that a target has a row of its embedding for.

    A tokenizer may know more: tokens that were added to it, and not to the model.

    Args:
        tokenizer: of transformers.
        num_rows: of the embedding; the token ids are below it.
    """

    def __init__(self, tokenizer: Any, num_rows: int) -> None:
        self._num_rows = num_rows
        self._without = {id: token for token, id in tokenizer.get_vocab().items() if id >= num_rows}

    @property
    def are_all(self) -> bool:
        """Whether every token of the tokenizer has a row."""
        return not self._without

    def trouble(self, tokens: Sequence[int]) -> str | None:
        """The first token without a row, in words; None where there is none."""
        for token in tokens:
            if token >= self._num_rows:
                return (
                    f"token {self._without.get(token)!r} (id {token}) has no row in the target's "
                    f"embedding of {self._num_rows} rows"
                )
        return None
