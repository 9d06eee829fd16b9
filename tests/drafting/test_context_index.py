# SPDX-License-Identifier: Apache-2.0
"""The index of continuations, against looking at every place of the texts."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_redrafter.drafting import context_index
from vllm_redrafter.drafting.context_index import ContextIndex
from vllm_redrafter.tree.context_matches import ContextMatches, find_matches

SLOTS, PATHS, LENGTH = 3, 2, 6
VOCAB_SIZE = 151_936


def matches(index: ContextIndex, texts: Mapping[str, list[int]]) -> ContextMatches:
    """Of the requests by name, each with a row of a table of its own."""
    size = max(map(len, texts.values()))
    table = np.array([text + [0] * (size - len(text)) for text in texts.values()])
    rows = np.arange(len(texts))[::-1]
    num_tokens = np.array([len(text) for text in texts.values()])
    return index.matches([*texts], table[::-1], rows, num_tokens)


def assert_matches(index: ContextIndex, texts: Mapping[str, list[int]]) -> None:
    """What `find_matches` finds."""
    size = max(map(len, texts.values()))
    padded = torch.tensor([text + [-7] * (size - len(text)) for text in texts.values()])
    num_tokens = torch.tensor([len(text) for text in texts.values()])
    sizes = index.num_paths, index.path_length, index.vocab_size
    expected = find_matches(padded, num_tokens, *sizes)
    found = matches(index, texts)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.tokens, expected.tokens)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=SLOTS),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_texts_that_grow_have_the_matches_of_the_whole_text(
    texts: list[list[int]], first: int, step: int
) -> None:
    index = ContextIndex(SLOTS, PATHS, LENGTH, vocab_size=3)
    for upto in range(first, 60, step):
        assert_matches(index, {str(r): text[:upto] for r, text in enumerate(texts)})


@pytest.mark.parametrize("kind", ["one token", "periodic", "no repetition", "random", "top ids"])
def test_adversarial_texts_beyond_the_first_room(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_index, "FIRST_CAPACITY", 16)
    random = np.random.default_rng(0)
    size = 400
    text = {
        "one token": np.full(size, 3),
        "periodic": np.arange(size) % 7,
        "no repetition": np.arange(size),
        "random": random.integers(0, 5, size),
        "top ids": random.integers(VOCAB_SIZE - 3, VOCAB_SIZE, size),
    }[kind].tolist()
    index = ContextIndex(SLOTS, PATHS, LENGTH, VOCAB_SIZE)
    for upto in (1, 2, 15, 16, 17, 100, 333, size):
        assert_matches(index, {"a": text[:upto], "b": text[: upto // 2 + 1]})


def test_requests_that_left_are_forgotten_and_those_preempted_are_entered_anew() -> None:
    index = ContextIndex(2, PATHS, LENGTH, VOCAB_SIZE)
    steps: list[dict[str, list[int]]] = [
        {"a": [1, 2, 1], "b": [3, 3]},
        {"b": [3, 3, 3], "c": [5, 6, 5]},
        {"d": [7, 7]},
        {"a": [1, 2, 1, 2], "b": [3, 3, 3]},
    ]
    for texts in steps:
        assert_matches(index, texts)
    index.forget("a")
    index.forget("nobody")
    assert_matches(index, {"a": [1], "b": [3, 3, 3]})
    assert not matches(index, {"c": [2]}).lengths.any()


def test_memory_of_requests_that_left_is_used_again() -> None:
    index = ContextIndex(2, PATHS, LENGTH, VOCAB_SIZE)
    sizes = set()
    for request in range(20):
        for upto in (500, 3000):
            text = [token % 37 for token in range(upto)]
            assert_matches(index, {str(request): text, "other": [1, 1]})
        index.forget(str(request))
        sizes.add(index.num_bytes)
    assert len(sizes) == 1
