# SPDX-License-Identifier: Apache-2.0
"""Candidates of each depth of a draft."""

import pytest
import torch

from vllm_redrafter.config import FEWEST_CANDIDATES
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.heads.shortlist import affordable
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search

VOCABULARY, HIDDEN, LENGTH = 97, 16, 4
SELECTOR = SelectorConfig(LENGTH - 1, 5)


def drafter(name: str) -> DraftHead:
    torch.manual_seed(1)
    head = new_head(name, VOCABULARY, HIDDEN, LENGTH, selector=SELECTOR).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(embedding, hidden states, root tokens)."""
    generator = torch.Generator().manual_seed(2)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    hidden = torch.randn(3, HIDDEN, generator=generator)
    return embedding, hidden, torch.randint(VOCABULARY, (3,), generator=generator)


def search(head: DraftHead, candidates: int) -> ExploredNodes:
    embedding, hidden, roots = inputs()
    return beam_search(
        head, lambda x: embedding[x], hidden, roots, 4, LENGTH, candidates=candidates
    )


@pytest.mark.parametrize("name", ["recurrent", "gated"])
def test_a_search_among_all_tokens_finds_what_one_of_the_vocabulary_finds(name: str) -> None:
    head = drafter(name)
    found, expected = search(head, VOCABULARY), search(head, 0)
    assert found.tokens.equal(expected.tokens)
    assert found.back_pointers.equal(expected.back_pointers)
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("name", ["recurrent", "gated"])
def test_nodes_below_the_first_level_are_among_the_candidates(name: str) -> None:
    head, count = drafter(name), 6
    embedding, hidden, roots = inputs()
    condition = head.condition(hidden).unsqueeze(1)
    state = head.start(condition, embedding[roots].unsqueeze(1))
    shortlist = head.shortlist(condition, state, LENGTH, count)
    found, dense = search(head, count), search(head, 0)
    for depth in range(1, LENGTH):
        allowed = shortlist.tokens[:, depth - 1]
        among = (found.tokens[:, depth, :, None] == allowed[:, None]).any(-1)
        assert among.all()
    assert not found.tokens.equal(dense.tokens)


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
