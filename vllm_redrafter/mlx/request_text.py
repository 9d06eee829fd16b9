"""A request's text, and how it went on before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.context_index import ContextIndex
from vllm_redrafter.tree.context_matches import ContextMatches

NAME = ""
"""Of the only request."""


class RequestText:
    """The tokens of a prompt and of its answer so far."""

    def __init__(self, prompt: Sequence[int], config: ReDrafterConfig, vocab_size: int) -> None:
        self._tokens = np.array([prompt], dtype=np.int32)
        self._length = len(prompt)
        self._index: ContextIndex | None = None
        if config.context_matches:
            paths = config.context_matches, config.path_length
            self._index = ContextIndex(1, *paths, vocab_size)

    def append(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, end)))
        self._tokens[0, self._length : end] = tokens
        self._length = end

    def matches(self) -> ContextMatches | None:
        """Of the last tokens; None where nobody looks for any."""
        if self._index is None:
            return None
        return self._index.matches([NAME], self._tokens, np.zeros(1, int), np.array([self._length]))
