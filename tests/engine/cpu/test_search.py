# SPDX-License-Identifier: Apache-2.0
"""The search on the host against `beam_search.py`, which says what it computes."""

import pytest
import torch
from torch import Tensor

from vllm_redrafter.engine.cpu import packed_weights
from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.heads.head import SearchHead
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.top_of_many import FOLDS

V, H = 300, 32


def drafter(
    draft_vocab_size: int | None = None, dtype: torch.dtype = torch.float32
) -> RecurrentHead:
    torch.manual_seed(0)
    config = RecurrentConfig(V, H, exit_dim=48, draft_vocab_size=draft_vocab_size)
    made = RecurrentHead(config).to(dtype).eval().requires_grad_(False)
    if draft_vocab_size is not None:
        made.keep_tokens(torch.randperm(V)[:draft_vocab_size].sort().values)
    # Far from one another, so that no two candidates are as good.
    made.vocabulary_layers[0].weight.mul_(20)
    return made


def both(
    head: SearchHead, requests: int, shape: SearchShape, dtype: torch.dtype = torch.float32
) -> tuple[ExploredNodes, ExploredNodes]:
    embedding = torch.randn(V, H).to(dtype)
    hidden, roots = torch.randn(requests, H).to(dtype), torch.arange(requests)

    def embed(tokens: Tensor) -> Tensor:
        return embedding[tokens]

    return beam_search(head, embed, hidden, roots, *shape), search(
        head, embed, hidden, roots, shape
    )


def assert_same(found: ExploredNodes, expected: ExploredNodes) -> None:
    missing = expected.log_probs == -torch.inf
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    assert torch.equal(found.tokens[~missing], expected.tokens[~missing])
    assert torch.equal(found.back_pointers[~missing], expected.back_pointers[~missing])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("draft_vocab_size", [None, 120])
@pytest.mark.parametrize(("requests", "width", "length"), [(1, 1, 1), (1, 4, 5), (6, 3, 4)])
def test_a_search_finds_the_same_nodes(
    packed: bool, draft_vocab_size: int | None, requests: int, width: int, length: int
) -> None:
    plain = drafter(draft_vocab_size)
    head = packed_form(plain, packed_weights.packed) if packed else plain
    expected, found = both(head, requests, SearchShape(width, length))
    assert (expected.log_probs > -torch.inf).all()
    assert_same(found, expected)
    assert [part.dtype for part in vars(found).values()] == [
        part.dtype for part in vars(expected).values()
    ]
    assert all(part.is_contiguous() for part in vars(found).values())


@pytest.mark.parametrize(("tokens", "width"), [(2, 3), (9, 4), (60, 55)])
def test_where_there_are_fewer_continuations_than_beams_the_rest_is_missing(
    tokens: int, width: int
) -> None:
    expected, found = both(drafter(tokens), 2, SearchShape(width, 3))
    assert (expected.log_probs[:, 0] == -torch.inf).sum() == 2 * max(0, width - min(tokens, 50))
    assert_same(found, expected)


def test_half_precision_is_widened_before_it_is_ranked() -> None:
    head = drafter(dtype=torch.bfloat16)
    expected, found = both(head, 3, SearchShape(2, 1), torch.bfloat16)
    torch.testing.assert_close(found.log_probs, expected.log_probs)


def test_of_equally_good_tokens_the_first_are_taken() -> None:
    head = drafter()
    head.vocabulary_layers[0].weight.zero_()
    _, found = both(head, 1, SearchShape(3, 2))
    assert found.tokens.tolist() == [[[0, 1, 2], [0, 1, 2]]]
    assert found.back_pointers.tolist() == [[[0, 0, 0], [0, 0, 0]]]


def test_what_is_not_a_number_is_no_candidate() -> None:
    head = drafter()
    head.vocabulary_layers[0].weight[7:].fill_(torch.nan)
    _, found = both(head, 1, SearchShape(4, 3))
    assert (found.tokens < 7).all()
    assert found.log_probs.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_vocabulary_gives_the_same_nodes(packed: bool) -> None:
    torch.manual_seed(0)
    tokens = 2 * 50 * FOLDS + 7
    plain = RecurrentHead(RecurrentConfig(tokens, H, exit_dim=48)).eval().requires_grad_(False)
    plain.vocabulary_layers[0].weight.mul_(20)
    embedding, hidden = torch.randn(tokens, H), torch.randn(3, H)
    head = packed_form(plain, packed_weights.packed) if packed else plain
    arguments = (head, lambda found: embedding[found], hidden, torch.arange(3))
    assert_same(search(*arguments, SearchShape(4, 3)), beam_search(*arguments, 4, 3))
