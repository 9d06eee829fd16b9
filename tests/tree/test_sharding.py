# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a part of the draft vocabulary each choose what one with all of it does."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_redrafter.tree.beam_search import log_softmax_of_top
from vllm_redrafter.tree.sharding import VocabularyShard


@settings(deadline=None, max_examples=200)
@given(
    tokens=st.integers(1, 400),
    ranks=st.integers(1, 9),
    beams=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_the_best_of_all_ranks_are_the_best(tokens: int, ranks: int, beams: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randperm(beams * tokens, generator=generator).view(1, beams, tokens) / 7
    sent: list[torch.Tensor] = []

    def send(mine: torch.Tensor) -> torch.Tensor:
        sent.append(mine)
        return torch.cat([mine] * ranks, dim=-1)

    for rank in range(ranks):
        part = VocabularyShard(tokens, rank, ranks, send)
        part.top(logits[..., part.rows])
    gathered, expected = torch.cat(sent, dim=-1), log_softmax_of_top(logits, 5)
    for rank in range(ranks):
        part = VocabularyShard(tokens, rank, ranks, lambda _: gathered)
        found = log_softmax_of_top(logits[..., part.rows], 5, part)
        assert torch.equal(found[0], expected[0])
        known = expected[0] > -torch.inf
        assert torch.equal(found[1][known], expected[1][known])
