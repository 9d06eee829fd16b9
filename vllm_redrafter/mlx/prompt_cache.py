# SPDX-License-Identifier: Apache-2.0
"""The prompt cache of mlx-lm's server, whose entries know their tokens: a draft may repeat them."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import LRUPromptCache, trim_prompt_cache


class CachedText(list[Any]):
    """The layers' caches, as mlx-lm hands them around.

    Attributes:
        tokens: that are in them.
    """

    def __init__(self, caches: list[Any], tokens: list[int]) -> None:
        super().__init__(caches)
        self.tokens = tokens


class PromptCache(LRUPromptCache):
    """mlx-lm's own; what is found comes with its tokens."""

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[CachedText | None, list[int]]:
        """As mlx-lm's; but the last token is always left to be computed, for its logits."""
        found, rest = super().fetch_nearest_cache(model, tokens)
        if found is None:
            return None, rest
        if not rest:
            trim_prompt_cache(found, 1)
            rest = tokens[-1:]
        return CachedText(found, tokens[: -len(rest)]), rest
