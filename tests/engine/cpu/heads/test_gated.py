# SPDX-License-Identifier: Apache-2.0
"""The gated head's form on packed weights computes what the plain head does."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.heads.gated import GatedConfig, GatedHead
from vllm_redrafter.heads.head import Product
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.tree.beam_search import beam_search
from vllm_redrafter.tree.policy import SearchShape

# Not a multiple of what vector instructions take at once.
V, H, R, W, L = 300, 37, 3, 4, 5

CONFIGS = [
    pytest.param(GatedConfig(V, H), id="no residual block"),
    pytest.param(GatedConfig(V, H, num_draft_layers=2), id="two residual blocks"),
    pytest.param(GatedConfig(V, H, draft_vocab_size=120), id="draft vocabulary"),
    pytest.param(GatedConfig(V, H, target_layers=(1, 2, 5)), id="three layers"),
]
every_config = pytest.mark.parametrize("config", CONFIGS)


def random_head(config: GatedConfig, dtype: torch.dtype = torch.float32) -> GatedHead:
    torch.manual_seed(0)
    head = GatedHead(config).to(dtype).eval().requires_grad_(False)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    if config.draft_vocab_size is not None:
        head.keep_tokens(torch.randperm(V)[: config.draft_vocab_size].sort().values)
    return head


def with_norm(state: Tensor) -> Tensor:
    """A state as the packed form has it."""
    state = state.float()
    return torch.cat([state, normed(state)], dim=-1)


@every_config
def test_each_part_equals_the_plain_heads(config: GatedConfig) -> None:
    plain = random_head(config)
    fast = packed_form(plain, packed)
    hidden = torch.randn(R, 1, config.hidden_width)
    embedded, state = torch.randn(R, W, H), torch.randn(R, W, H)
    condition = plain.condition(hidden)
    close = torch.testing.assert_close
    close(fast.condition(hidden), with_norm(condition))
    root = plain.start(condition, embedded[:, :1])
    close(fast.start(fast.condition(hidden), embedded[:, :1]), with_norm(root))
    child = plain.advance(state, embedded)
    close(fast.advance(with_norm(state), embedded), with_norm(child))
    logits = plain.logits(condition, state, 1)
    close(fast.logits(fast.condition(hidden), with_norm(state), 1), logits)
    tokens = torch.arange(config.num_ranked_tokens)
    assert torch.equal(fast.target_tokens(tokens), plain.target_tokens(tokens))


@every_config
@pytest.mark.parametrize("width", [1, W])
def test_a_search_finds_the_same_nodes(config: GatedConfig, width: int) -> None:
    plain = random_head(config)
    embed, roots = nn.Embedding(V, H), torch.arange(R)
    hidden = torch.randn(R, config.hidden_width)
    expected = beam_search(plain, embed, hidden, roots, width, L)
    found = search(packed_form(plain, packed), embed, hidden, roots, SearchShape(width, L))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.back_pointers, expected.back_pointers)
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@every_config
def test_arguments_are_left_as_they_were(config: GatedConfig) -> None:
    fast = packed_form(random_head(config), packed)
    condition = fast.condition(torch.randn(R, 1, config.hidden_width))
    given = [condition, with_norm(torch.randn(R, W, H)), torch.randn(R, W, H)]
    before = [tensor.clone() for tensor in given]
    fast.advance(given[1], given[2])
    fast.logits(given[0], given[1], 1)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@every_config
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_nearer_to_the_exact_states(
    config: GatedConfig, dtype: torch.dtype
) -> None:
    """Than the plain head's, which rounds behind each of its calls; of a path of five tokens."""
    plain = random_head(config, dtype)
    exact, fast = random_head(config, dtype).double(), packed_form(plain, packed)
    hidden = torch.randn(R, 1, config.hidden_width).to(dtype)
    embedded = torch.randn(5, R, 1, H).to(dtype)
    states = [form.condition(h) for form, h in ((plain, hidden), (exact, hidden.double()))]
    states.append(fast.condition(hidden))
    for step in embedded:
        states = [
            plain.advance(states[0], step),
            exact.advance(states[1], step.double()),
            fast.advance(states[2], step),
        ]
    plain_error, fast_error = (
        (state[..., :H].double() - states[1]).square().mean() for state in (states[0], states[2])
    )
    assert fast_error <= plain_error
    condition = fast.condition(hidden)
    torch.testing.assert_close(
        fast.logits(condition, states[2], 1).double(),
        exact.logits(states[1], states[1], 1),
        rtol=0.05,
        atol=0.2,
    )


def test_nothing_but_zeros_gives_numbers() -> None:
    """Engines rehearse on them."""
    fast = packed_form(random_head(GatedConfig(V, H)), packed)
    zeros = torch.zeros(R, 1, H)
    state = fast.start(fast.condition(zeros), zeros)
    assert fast.logits(fast.condition(zeros), state, 0).isfinite().all()


def test_what_is_packed_are_the_heads_own_weights_not_copies() -> None:
    head = random_head(GatedConfig(V, H, num_draft_layers=2))
    given: list[int] = []

    def pack(weight: Tensor, bias: Tensor | None) -> Product:
        given.append(weight.data_ptr())
        return lambda x: F.linear(x, weight, bias)

    packed_form(head, pack)
    own = {m.weight.data_ptr() for m in head.modules() if isinstance(m, nn.Linear)}
    assert len(given) == 4 and set(given) == own


def test_the_unpacked_weights_are_freed() -> None:
    plain = random_head(GatedConfig(V, H, num_draft_layers=1))
    weights = [weakref.ref(p) for p in plain.parameters() if p.dim() > 1]
    fast = packed_form(plain, packed)
    del plain
    gc.collect()
    assert fast.config.hidden_size == H and all(weight() is None for weight in weights)
