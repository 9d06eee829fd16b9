# SPDX-License-Identifier: Apache-2.0
"""Candidates of each depth of a draft."""

import pytest
import torch

from redrafter_testing.models.head_forms import random_head
from vllm_redrafter.config import FEWEST_CANDIDATES
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.heads.shortlist import affordable
from vllm_redrafter.tree.beam_search import beam_search

VOCABULARY, HIDDEN, LENGTH = 97, 16, 4
SELECTOR = SelectorConfig(LENGTH - 1, 5)


@pytest.mark.parametrize("name", ["recurrent", "gated"])
def test_a_search_ranks_the_candidates_alone(name: str) -> None:
    """All tokens as candidates: the search of the vocabulary. Few: its nodes are among them."""
    head = random_head(new_head(name, VOCABULARY, HIDDEN, selector=SELECTOR).config)
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
    hidden, roots = torch.randn(3, HIDDEN), torch.randint(VOCABULARY, (3,))
    dense, whole, few = (
        beam_search(head, embedding, hidden, roots, 4, LENGTH, candidates=candidates)
        for candidates in (0, VOCABULARY, 6)
    )
    assert whole.tokens.equal(dense.tokens)
    assert whole.back_pointers.equal(dense.back_pointers)
    torch.testing.assert_close(whole.log_probs, dense.log_probs)
    condition = head.condition(hidden).unsqueeze(1)
    state = head.start(condition, embedding(roots).unsqueeze(1))
    shortlist = head.shortlist(condition, state, LENGTH, 6)
    for depth in range(1, LENGTH):
        allowed = shortlist.tokens[:, depth - 1]
        assert (few.tokens[:, depth, :, None] == allowed[:, None]).any(-1).all()
    assert not few.tokens.equal(dense.tokens)


@pytest.mark.parametrize(
    ("count", "requests", "length", "vocabulary", "expected"),
    [
        (128, 1, 5, 32768, 128),
        (128, 64, 5, 32768, 128),
        (128, 65, 5, 32768, 64),
        (128, 256, 5, 32768, FEWEST_CANDIDATES),
        (128, 2000, 5, 32768, 0),
        (128, 1, 1, 32768, 0),
        (0, 1, 5, 32768, 0),
    ],
)
def test_candidates_halve_where_gathering_them_reads_more_than_the_vocabulary(
    count: int, requests: int, length: int, vocabulary: int, expected: int
) -> None:
    assert affordable(count, requests, length, vocabulary) == expected
