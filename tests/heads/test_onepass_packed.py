"""The onepass head's form for a host computes what the plain one does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.heads.head import Product, SearchHead
from vllm_redrafter.heads.onepass import OnePassConfig, OnePassHead

# Not a multiple of what vector instructions take at once.
V, H, S, R, W, L = 300, 37, 11, 3, 4, 4
SIZES = {"levels": L, "state_size": S, "base_rank": 9}

CONFIGS = [
    pytest.param(OnePassConfig(V, H, **SIZES), id="plain"),
    pytest.param(OnePassConfig(V, H, **SIZES, draft_vocab_size=120), id="draft vocabulary"),
    pytest.param(OnePassConfig(V, H, **SIZES, target_layers=(1, 2, 5)), id="three layers"),
]
every_config = pytest.mark.parametrize("config", CONFIGS)


def random_head(config: OnePassConfig, dtype: torch.dtype = torch.float32) -> OnePassHead:
    torch.manual_seed(0)
    head = OnePassHead(config).to(dtype).eval().requires_grad_(False)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    if config.draft_vocab_size is not None:
        head.keep_tokens(torch.randperm(V)[: config.draft_vocab_size].sort().values)
    return head


def nodes(head: SearchHead, hidden: Tensor, embedded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The condition and the state at every depth of paths [L, R, W, H]; the root's has no W."""
    condition = head.condition(hidden)
    state = head.start(condition, embedded[0, :, :1])
    yield condition, state
    state = state.expand(-1, W, -1)
    for tokens in embedded[1:]:
        state = head.advance(state, tokens)
        yield condition, state


def inputs(config: OnePassConfig, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(R, 1, config.hidden_width, dtype=dtype), torch.randn(L, R, W, H, dtype=dtype)


@every_config
def test_features_and_logits_at_each_depth_equal_the_plain_heads(config: OnePassConfig) -> None:
    plain = random_head(config)
    fast, given = plain.packed(packed), inputs(config)
    both = zip(nodes(fast, *given), nodes(plain, *given), strict=True)
    for depth, (found, expected) in enumerate(both):
        for of_head in ("features", "logits"):
            torch.testing.assert_close(
                getattr(fast, of_head)(*found, depth), getattr(plain, of_head)(*expected, depth)
            )
    tokens = torch.arange(config.num_ranked_tokens)
    assert fast.target_tokens(tokens).equal(plain.target_tokens(tokens))


@every_config
@pytest.mark.parametrize("length", [2, L])
def test_candidates_equal_the_plain_heads(config: OnePassConfig, length: int) -> None:
    plain = random_head(config)
    fast, given = plain.packed(packed), inputs(config)
    found, expected = (
        head.shortlist(*next(nodes(head, *given)), length, 32) for head in (fast, plain)
    )
    torch.testing.assert_close(found.root_logits, expected.root_logits)
    assert found.tokens.sort().values.equal(expected.tokens.sort().values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_nearer_to_the_exact_features(dtype: torch.dtype) -> None:
    """Than the plain head's, which rounds behind each of its calls; of the deepest nodes."""
    config = OnePassConfig(V, H, **SIZES)
    plain, exact = random_head(config, dtype), random_head(config, dtype).double()
    fast, (hidden, embedded) = plain.packed(packed), inputs(config, dtype)
    states = [
        list(nodes(head, *given))[-1]
        for head, given in (
            (plain, (hidden, embedded)),
            (fast, (hidden, embedded)),
            (exact, (hidden.double(), embedded.double())),
        )
    ]
    features = [
        head.features(*state, L - 1).double()
        for head, state in zip((plain, fast, exact), states, strict=True)
    ]
    plain_error, fast_error = ((x - features[2]).square().mean() for x in features[:2])
    assert fast_error <= plain_error


@every_config
def test_arguments_are_left_as_they_were(config: OnePassConfig) -> None:
    fast = random_head(config).packed(packed)
    hidden, embedded = inputs(config)
    for depth, (condition, state) in enumerate(nodes(fast, hidden, embedded)):
        given = [condition, state, embedded[0, :, : state.shape[1]]]
        before = [tensor.clone() for tensor in given]
        fast.features(condition, state, depth)
        fast.advance(state, given[2])
        assert all(a.equal(b) for a, b in zip(given, before, strict=True))


def test_what_the_root_tells_of_all_depths_is_computed_once() -> None:
    """Below it, a level's products are those with M, D and V."""
    head = random_head(OnePassConfig(V, H, **SIZES))
    names = {p.data_ptr(): name for name, p in head.named_parameters()}
    made: list[str] = []

    def pack(weight: Tensor, bias: Tensor | None) -> Product:
        def product(x: Tensor) -> Tensor:
            made.append(names.get(weight.data_ptr(), "base.up"))
            return F.linear(x, weight, bias)

        return product

    fast = head.packed(pack)
    for depth, (condition, state) in enumerate(nodes(fast, *inputs(head.config))):
        fast.logits(condition, state, depth)
    root = ["cell.weight", "base.down.weight", *["base.up"] * (L - 1), "first.weight"]
    level = ["mix.weight", "change.weight", "lm_head.weight"]
    assert made == [*root, "lm_head.weight", *level * (L - 1)]


def test_nothing_but_zeros_gives_numbers() -> None:
    """Engines rehearse on them."""
    config = OnePassConfig(V, H, **SIZES)
    fast = random_head(config).packed(packed)
    zeros = torch.zeros(R, 1, H), torch.zeros(L, R, W, H)
    for depth, (condition, state) in enumerate(nodes(fast, *zeros)):
        assert fast.logits(condition, state, depth).isfinite().all()
