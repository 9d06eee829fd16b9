# SPDX-License-Identifier: Apache-2.0
"""Histories of answers, and what is found in them."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.earlier_answers import EarlierAnswers, find_earlier

_OF_PARTITION = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(-1, 2))
ANSWERS = st.lists(_OF_PARTITION, max_size=12)
"""(tokens, partition) of each; long ones have more than 32 places of some tokens."""
TEXTS = st.lists(_OF_PARTITION, min_size=1, max_size=4)


def found_earlier(
    answers: EarlierAnswers,
    texts: Sequence[tuple[Sequence[int], int]],
    paths: tuple[int, int],
    vocab_size: int,
) -> ContextMatches:
    """Of texts with their partitions."""
    num_tokens = torch.tensor([len(text) for text, _ in texts])
    # What stands behind a text is of other requests, and looks like a continuation.
    padded = torch.tensor([[*text, *text * 50][:50] for text, _ in texts])
    partitions = torch.tensor([partition for _, partition in texts])
    return find_earlier(answers, padded, num_tokens, partitions, paths, vocab_size)
