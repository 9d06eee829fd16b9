"""The prompt cache of mlx-lm's server, for requests whose last token is not in the KV cache yet."""

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
    """mlx-lm's own, with entries named by exactly the tokens in them.

    The server names an entry by all tokens of a request. Plain decoding has the last of them in the
    KV cache; a step that verifies has it in the next step only, as that one's root.
    """

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **more: Any
    ) -> None:
        """As mlx-lm's; the name is cut to the tokens that the KV cache has."""
        super().insert_cache(model, tokens[: prompt_cache[0].offset], [*prompt_cache], **more)

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
