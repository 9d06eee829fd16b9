# SPDX-License-Identifier: Apache-2.0
"""Heads on packed weights; that they compute what plain heads do is test_search.py's."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.heads.gated import PackedGatedHead
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.heads.gated import GatedConfig, GatedHead
from vllm_redrafter.heads.head import DraftHead, HeadConfig, Pack, SearchHead
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.heads.selector import SelectorConfig

# Not a multiple of what vector instructions take at once.
V, H, R, W = 300, 37, 3, 4

SELECTOR = SelectorConfig(2, 8)
CONFIGS = [
    GatedConfig(V, H, num_draft_layers=2, target_layers=(1, 2)),
    RecurrentConfig(V, H, exit_dim=48),
    GatedConfig(V, H, selector=SELECTOR),
    RecurrentConfig(V, H, exit_dim=48, selector=SELECTOR),
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)


def random_head(config: HeadConfig, dtype: torch.dtype = torch.float32) -> DraftHead:
    torch.manual_seed(0)
    head = build_head(config).to(dtype).eval().requires_grad_(False)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return head


@every_config
def test_arguments_are_left_as_they_were(config: HeadConfig) -> None:
    fast = packed_form(random_head(config), packed)
    condition = fast.condition(torch.randn(R, 1, config.hidden_width))
    given = [condition, fast.start(condition, torch.randn(R, 1, H)), torch.randn(R, 1, H)]
    before = [tensor.clone() for tensor in given]
    fast.advance(given[1], given[2])
    fast.logits(given[0], given[1], 1)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@every_config
def test_no_matrix_is_kept_but_the_vocabulary_layers_for_candidates(config: HeadConfig) -> None:
    plain = random_head(config)
    weights = {n: weakref.ref(p) for n, p in plain.named_parameters() if p.dim() > 1}
    (layer,) = plain.vocabulary_layers
    kept = {n for n, p in plain.named_parameters() if p is layer.weight and config.selector}
    fast = packed_form(plain, packed)
    del plain, layer
    gc.collect()
    assert fast.config is config
    assert {n for n, weight in weights.items() if weight() is not None} <= kept


@every_config
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_exact_logits(config: HeadConfig, dtype: torch.dtype) -> None:
    plain = random_head(config, dtype)
    fast, exact = packed_form(plain, packed), random_head(config, dtype).double()
    hidden, embedded = torch.randn(R, 1, config.hidden_width), torch.randn(4, R, 1, H)
    hidden, embedded = hidden.to(dtype), embedded.to(dtype)

    def logits(head: SearchHead, as_type: torch.dtype) -> Tensor:
        condition = head.condition(hidden.to(as_type))
        state = head.start(condition, embedded[0].to(as_type))
        for step in embedded[1:]:
            state = head.advance(state, step.to(as_type))
        return head.logits(condition, state, 1).double()

    expected = logits(exact, torch.float64)
    error = (logits(fast, dtype) - expected).square().mean()
    assert error <= 1.1 * (logits(plain, dtype) - expected).square().mean()


def test_zeros_give_numbers() -> None:
    """Engines rehearse on them."""
    fast = packed_form(random_head(CONFIGS[0]), packed)
    condition = fast.condition(torch.zeros(R, 1, 3 * H))
    state = fast.start(condition, torch.zeros(R, 1, H))
    assert fast.logits(condition, state, 0).isfinite().all()


class Bringing(GatedHead):
    """Brings a form."""

    def packed(self, pack: Pack) -> SearchHead:
        return PackedGatedHead(self, pack)


class Doubled(GatedHead):
    """Derived from a head that has a form, with other mathematics."""

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        return super().start(condition, 2 * embedded)


def test_heads_of_other_packages_bring_a_form_or_keep_their_mathematics() -> None:
    assert isinstance(packed_form(Bringing(GatedConfig(V, H)), packed), PackedGatedHead)
    plain = Doubled(GatedConfig(V, H)).requires_grad_(False)
    fast, (condition, embedded) = packed_form(plain, packed), torch.randn(2, 3, 1, H)
    torch.testing.assert_close(fast.start(condition, embedded), plain.start(condition, embedded))
    assert not any(isinstance(module, nn.Linear) for module in fast.modules())
