# SPDX-License-Identifier: Apache-2.0
"""Ranks that have a part of the draft vocabulary each choose what one with all of it does."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import beam_search, log_softmax_of_top
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


def test_a_search_by_shards_explores_the_same_nodes() -> None:
    """Ranks in lockstep, as threads that wait for each other."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    torch.manual_seed(0)
    config = RecurrentConfig(vocab_size=90, hidden_size=16, exit_dim=16, draft_vocab_size=61)
    whole = RecurrentHead(config)
    whole.keep_tokens(torch.arange(7, 68))
    embedding, hidden = torch.randn(90, 16), torch.randn(3, 16)
    roots = torch.tensor([1, 50, 80])
    ranks = 3
    told: list[torch.Tensor] = [torch.empty(0)] * ranks
    barrier = Barrier(ranks, timeout=60)

    def search(rank: int) -> object:
        def gather(mine: torch.Tensor) -> torch.Tensor:
            told[rank] = mine
            barrier.wait()
            everything = torch.cat(told, dim=-1)
            barrier.wait()
            return everything

        shard = VocabularyShard(61, rank, ranks, gather)
        drafter = RecurrentHead(config)
        drafter.load_state_dict(whole.state_dict())
        shard.cut(drafter)
        assert drafter.vocabulary_layers[0].weight.shape == (21 if rank < 2 else 19, 16)
        return beam_search(drafter, lambda t: embedding[t], hidden, roots, 4, 3, shard)

    expected = beam_search(whole, lambda t: embedding[t], hidden, roots, 4, 3)
    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(search, range(ranks)):
            assert torch.equal(found.tokens, expected.tokens)
            assert torch.equal(found.back_pointers, expected.back_pointers)
            torch.testing.assert_close(found.log_probs, expected.log_probs)
