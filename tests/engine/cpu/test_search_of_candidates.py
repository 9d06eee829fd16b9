# SPDX-License-Identifier: Apache-2.0
"""The search on the host against `beam_search.py` where nodes choose among candidates."""

from typing import Any

import pytest
import torch
from torch import nn

from vllm_redrafter.engine.cpu.heads.forms import packed_form, with_packed_layers
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.heads.head import DraftHead, SearchHead
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.policy import SearchShape

V, H, L, C = 300, 37, 4, 32

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"draft_vocab_size": 120}, id="draft vocabulary"),
    pytest.param({"target_layers": (1, 2, 5)}, id="three layers"),
]
HEADS = ("recurrent", "gated")


def random_head(
    name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> DraftHead:
    torch.manual_seed(0)
    options = {"selector": SelectorConfig(L - 1, 9), **options}
    head = new_head(name, V, H, L, **options).to(dtype).eval().requires_grad_(False)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    if head.config.draft_vocab_size is not None:
        head.keep_tokens(torch.randperm(V)[: head.config.draft_vocab_size].sort().values)
    return head


def both(
    plain: DraftHead, form: SearchHead, requests: int, shape: SearchShape, candidates: int
) -> tuple[ExploredNodes, ExploredNodes]:
    """What is found of `form`, and what `beam_search.py` finds of the plain head."""
    torch.manual_seed(1)
    dtype = plain.dtype
    embed = nn.Embedding(V, H, dtype=dtype)
    given = (
        embed,
        torch.randn(requests, plain.config.hidden_width).to(dtype),
        torch.arange(requests),
    )
    expected = beam_search(plain, *given, *shape, candidates=candidates)
    return search(form, *given, shape, candidates), expected


def assert_same(found: ExploredNodes, expected: ExploredNodes) -> None:
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-4)
    assert found.tokens.equal(expected.tokens)
    assert found.back_pointers.equal(expected.back_pointers)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("requests", "width", "length"), [(1, 1, L), (1, 4, 2), (3, 1, 3), (3, 4, L), (2, 3, 1)]
)
def test_a_search_finds_the_same_nodes(
    name: str, options: dict[str, Any], requests: int, width: int, length: int
) -> None:
    plain = random_head(name, options)
    for form in (plain, packed_form(plain, packed)):
        assert_same(*both(plain, form, requests, SearchShape(width, length), C))


def test_a_search_of_a_head_without_a_form_of_its_own_finds_the_same_nodes() -> None:
    plain = random_head("gated", {})
    form = with_packed_layers(plain, packed)
    assert_same(*both(plain, form, 3, SearchShape(4, L), C))


@pytest.mark.parametrize("name", HEADS)
def test_among_all_tokens_a_search_finds_what_one_of_the_vocabulary_finds(name: str) -> None:
    fast = packed_form(random_head(name, {}), packed)
    embed, hidden, roots = nn.Embedding(V, H), torch.randn(3, H), torch.arange(3)
    shape = SearchShape(4, L)
    assert_same(
        search(fast, embed, hidden, roots, shape, V), search(fast, embed, hidden, roots, shape)
    )


@pytest.mark.parametrize("name", HEADS)
def test_half_precision_finds_nearly_as_probable_nodes(name: str) -> None:
    """Of the exact head's, whose best beams are other ones where two are nearly as good."""
    plain = random_head(name, {}, torch.bfloat16)
    exact = random_head(name, {}, torch.bfloat16).float()
    shape = SearchShape(4, L)
    found = both(plain, packed_form(plain, packed), 3, shape, V)[0]
    torch.manual_seed(1)
    embed = nn.Embedding(V, H, dtype=torch.bfloat16).float()
    hidden = torch.randn(3, H).to(torch.bfloat16).float()
    expected = beam_search(exact, embed, hidden, torch.arange(3), *shape, candidates=V)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0.05, atol=0.2)
