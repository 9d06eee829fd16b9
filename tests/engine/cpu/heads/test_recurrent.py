# SPDX-License-Identifier: Apache-2.0
"""The recurrent head's form on packed weights computes what the plain head does."""

import gc
import weakref

import pytest
import torch

from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import beam_search

V, H, R, W, L = 300, 32, 3, 4, 5

CONFIGS = [
    pytest.param(RecurrentConfig(V, H, exit_dim=48), id="input projection"),
    pytest.param(RecurrentConfig(V, H, exit_dim=2 * H), id="no input projection"),
    pytest.param(RecurrentConfig(V, H, exit_dim=H, num_draft_layers=0), id="no residual block"),
    pytest.param(RecurrentConfig(V, H, exit_dim=H, num_draft_layers=3), id="three residual blocks"),
    pytest.param(RecurrentConfig(V, H, exit_dim=H, rnn=False), id="no RNN"),
    pytest.param(RecurrentConfig(V, H, exit_dim=H, draft_vocab_size=120), id="draft vocabulary"),
    pytest.param(RecurrentConfig(V, H, exit_dim=H, target_layers=(1, 2, 5)), id="three layers"),
]


def make(config: RecurrentConfig, dtype: torch.dtype = torch.float32) -> RecurrentHead:
    torch.manual_seed(0)
    drafter = RecurrentHead(config).to(dtype).eval().requires_grad_(False)
    if drafter.fuse is not None:
        torch.nn.init.normal_(drafter.fuse.weight)
    if config.draft_vocab_size is not None:
        drafter.keep_tokens(torch.randperm(V)[: config.draft_vocab_size].sort().values)
    return drafter


@pytest.mark.parametrize("config", CONFIGS)
def test_each_part_equals_the_plain_drafters(config: RecurrentConfig) -> None:
    plain = make(config)
    fast = packed_form(plain, packed)
    hidden = torch.randn(R, 1, config.hidden_width)
    embedded, state = torch.randn(R, W, H), torch.randn(R, W, H)
    torch.testing.assert_close(fast.condition(hidden), plain.condition(hidden))
    torch.testing.assert_close(fast.advance(state, embedded), plain.advance(state, embedded))
    condition = plain.condition(hidden)
    torch.testing.assert_close(fast.start(condition, embedded), plain.start(condition, embedded))
    torch.testing.assert_close(fast.logits(condition, state, 1), plain.logits(condition, state, 1))
    tokens = torch.arange(config.num_ranked_tokens)
    assert torch.equal(fast.target_tokens(tokens), plain.target_tokens(tokens))


@pytest.mark.parametrize("config", CONFIGS)
def test_a_search_finds_the_same_nodes(config: RecurrentConfig) -> None:
    plain = make(config)
    embed, roots = torch.nn.Embedding(V, H), torch.arange(R)
    hidden = torch.randn(R, config.hidden_width)
    expected = beam_search(plain, embed, hidden, roots, W, L)
    found = beam_search(packed_form(plain, packed), embed, hidden, roots, W, L)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.back_pointers, expected.back_pointers)
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("config", CONFIGS)
def test_arguments_are_left_as_they_were(config: RecurrentConfig) -> None:
    fast = packed_form(make(config), packed)
    hidden = torch.randn(R, 1, config.hidden_width)
    condition, state = fast.condition(hidden), torch.randn(R, W, H)
    given = [condition, state, torch.randn(R, W, H)]
    before = [tensor.clone() for tensor in given]
    fast.advance(given[1], given[2])
    fast.logits(given[0], given[1], 1)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_plain_drafters(dtype: torch.dtype) -> None:
    """Packed where this processor can, by vLLM's own fallback elsewhere."""
    plain = make(RecurrentConfig(V, H, exit_dim=48), dtype)
    fast = packed_form(plain, packed)
    condition, state = torch.randn(R, 1, 48).to(dtype), torch.randn(R, W, H).to(dtype)
    expected = plain.logits(condition, state, 1).float()
    torch.testing.assert_close(
        fast.logits(condition, state, 1).float(), expected, rtol=0.05, atol=0.05
    )


def test_the_unpacked_weights_are_freed() -> None:
    plain = make(RecurrentConfig(V, H, exit_dim=48))
    weights = [weakref.ref(p) for p in plain.parameters()]
    fast = packed_form(plain, packed)
    del plain
    gc.collect()
    assert fast.config.hidden_size == H and all(weight() is None for weight in weights)
