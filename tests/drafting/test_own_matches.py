# SPDX-License-Identifier: Apache-2.0
"""Matches on the host, against looking for them one place at a time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.context_matches import slow_matches
from vllm_redrafter.drafting.own_matches import BLOCK, own_matches

VOCAB_SIZE = 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB_SIZE), min_size=1, max_size=40), min_size=1, max_size=3),
    st.integers(0, 2 * BLOCK),
    st.tuples(st.integers(1, 4), st.integers(1, 8)),
)
def test_matches_are_the_longest_and_of_these_the_newest(
    texts: list[list[int]], apart: int, paths: tuple[int, int]
) -> None:
    # Places of one text may be in several blocks.
    texts = [text + [VOCAB_SIZE] * apart + text for text in texts]
    size = max(map(len, texts)) + 50
    # What stands behind a text is of other requests, and looks like a continuation.
    padded = np.array([(text + text * size)[:size] for text in texts], dtype=np.int32)
    num_tokens = np.array([*map(len, texts)])

    backwards = np.arange(len(texts))[::-1].copy()
    found = own_matches(padded[::-1].copy(), backwards, num_tokens, paths, VOCAB_SIZE)

    expected = [slow_matches(text, paths, VOCAB_SIZE) for text in texts]
    assert found.tokens.tolist() == [tokens for tokens, _ in expected]
    assert found.classes.tolist() == [classes for _, classes in expected]


def test_a_path_ends_before_what_is_no_token() -> None:
    text = np.array([[1, 9, 1, 2, 9, 1]], dtype=np.int32)
    found = own_matches(text, np.array([0]), np.array([6]), (2, 4), 9)
    assert found.tokens.tolist() == [[[2, -1, -1, -1], [-1] * 4]]
    assert found.classes.tolist() == [[[2, 0, 0, 0], [0] * 4]]
