# SPDX-License-Identifier: Apache-2.0
"""Entries of the server's prompt cache have the tokens that they are named by."""

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import KVCache, LRUPromptCache

from vllm_redrafter.mlx.serve import PromptCache


def cache_of(tokens: list[int]) -> list[KVCache]:
    """Two layers' K and V, in which each row says which token it is of."""
    layers = [KVCache(), KVCache()]
    rows = mx.array(tokens, mx.float32).reshape(1, 1, -1, 1)
    for layer in layers:
        layer.update_and_fetch(rows, rows)
    return layers


def tokens_in(layers: list[Any]) -> list[list[int]]:
    return [
        [int(row) for row in layer.keys[..., : layer.offset, :].flatten().tolist()]
        for layer in layers
    ]


def fetched_after_an_answer(
    kind: type[LRUPromptCache], asked: list[int]
) -> tuple[list[list[int]], list[int]]:
    """What is found after a request of tokens 1 to 6."""
    cache = kind()
    cache.insert_cache("model", [1, 2, 3, 4, 5, 6], cache_of([1, 2, 3, 4, 5, 6]))
    found, rest = cache.fetch_nearest_cache("model", asked)
    assert found is not None
    return tokens_in(found), rest


@pytest.mark.parametrize(
    ("asked", "reused"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 6),
        ([1, 2, 3, 4, 5, 6], 5),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 9], 3),
        ([1, 2], 1),
    ],
    ids=["goes on", "the same", "all that is there", "another turn", "a part"],
)
def test_what_is_found_and_what_is_left_are_what_was_asked(asked: list[int], reused: int) -> None:
    found, rest = fetched_after_an_answer(PromptCache, asked)
    assert found == [asked[:reused]] * 2
    assert rest == asked[reused:]


def test_the_text_that_is_cached_is_known_with_it() -> None:
    cache = PromptCache()
    cache.insert_cache("model", [1, 2, 3], cache_of([1, 2, 3]))
    for asked, known in (([1, 2, 3, 4, 5], [1, 2, 3]), ([1, 2, 9], [1, 2])):
        found, _ = cache.fetch_nearest_cache("model", asked)
        assert found is not None and found.tokens == known
        cache.insert_cache("model", asked, found)
