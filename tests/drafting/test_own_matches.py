# SPDX-License-Identifier: Apache-2.0
"""Matches on the host, against looking at every place of the texts."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_redrafter.drafting.own_matches import BLOCK, own_matches
from vllm_redrafter.tree.context_matches import find_matches

VOCAB_SIZE = 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB_SIZE), min_size=1, max_size=40), min_size=1, max_size=3),
    st.integers(0, 2 * BLOCK),
    st.tuples(st.integers(1, 4), st.integers(1, 8)),
)
def test_matches_are_those_of_a_look_at_every_place(
    texts: list[list[int]], apart: int, paths: tuple[int, int]
) -> None:
    # Places of one text may be in several blocks.
    texts = [text + [VOCAB_SIZE] * apart + text for text in texts]
    size = max(map(len, texts)) + 1
    padded = np.array([text + [1] * (size - len(text)) for text in texts], dtype=np.int32)
    num_tokens = np.array([*map(len, texts)])

    backwards = np.arange(len(texts))[::-1].copy()
    found = own_matches(padded[::-1].copy(), backwards, num_tokens, paths, VOCAB_SIZE)

    both = torch.from_numpy(padded), torch.from_numpy(num_tokens)
    expected = find_matches(*both, *paths, VOCAB_SIZE)
    assert torch.equal(found.classes, expected.classes)
    assert torch.equal(found.tokens, expected.tokens)
