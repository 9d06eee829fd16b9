"""The prompt cache of mlx-lm's server, for requests whose last token is not in the KV cache yet."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import LRUPromptCache, trim_prompt_cache


class PromptCache(LRUPromptCache):
    """mlx-lm's own, with entries named by exactly the tokens in them.

    The server names an entry by all tokens of a request. Plain decoding has the last of them in the
    KV cache; a step that verifies has it in the next step only, as that one's root.
    """

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], **more: Any
    ) -> None:
        """As mlx-lm's; the name is cut to the tokens that the KV cache has."""
        super().insert_cache(model, tokens[: prompt_cache[0].offset], prompt_cache, **more)

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """As mlx-lm's; but the last token is always left to be computed, for its logits."""
        found, rest = super().fetch_nearest_cache(model, tokens)
        if found is not None and not rest:
            trim_prompt_cache(found, 1)
            rest = tokens[-1:]
        return found, rest
