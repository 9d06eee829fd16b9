# SPDX-License-Identifier: Apache-2.0
"""The search on the host, of each form of a head, against `tree/beam_search.py`."""

import gc
import weakref
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrafter_testing.models.head_forms import random_head
from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.heads.gated import PackedGatedHead
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.engine.cpu.v1.proposer import packed
from vllm_redrafter.heads.gated import GatedConfig, GatedHead
from vllm_redrafter.heads.head import DraftHead, HeadConfig, Pack, SearchHead
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.heads.speculators import MlpSpeculatorConfig
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.top_of_many import FOLDS

# Not a multiple of what vector instructions take at once.
V, H, L, C = 300, 37, 4, 32
SELECTOR = {"selector": SelectorConfig(L - 1, 9)}


def gated(**options: Any) -> GatedConfig:
    return GatedConfig(V, H, **SELECTOR, **options)


def recurrent(exit_dim: int = 48, **options: Any) -> RecurrentConfig:
    return RecurrentConfig(V, H, exit_dim=exit_dim, **SELECTOR, **options)


CONFIGS = {
    "gated": gated(),
    "gated, two residual blocks": gated(num_draft_layers=2),
    "gated, draft vocabulary": gated(draft_vocab_size=120),
    "gated, three layers": gated(target_layers=(1, 2, 5)),
    "recurrent": recurrent(),
    "recurrent, no input projection": recurrent(exit_dim=2 * H),
    "recurrent, no residual block": recurrent(num_draft_layers=0),
    "recurrent, three residual blocks": recurrent(num_draft_layers=3),
    "recurrent, no RNN": recurrent(rnn=False),
    "recurrent, draft vocabulary": recurrent(draft_vocab_size=120),
    "recurrent, three layers": recurrent(target_layers=(1, 2, 5)),
    "recurrent, large vocabulary": replace(recurrent(), vocab_size=2 * 50 * FOLDS + 7),
}


class OtherGatedHead(GatedHead):
    """Of another package: it has no form of its own, and its layers are packed."""


def both(
    plain: DraftHead, form: SearchHead, requests: int, shape: SearchShape, candidates: int = 0
) -> tuple[ExploredNodes, ExploredNodes]:
    """What the host's search finds of `form`, and what `beam_search` finds of the plain head."""
    torch.manual_seed(1)
    dtype, config = plain.dtype, plain.config
    hidden = torch.randn(requests, config.hidden_width).to(dtype)
    given = nn.Embedding(config.vocab_size, H, dtype=dtype), hidden, torch.arange(requests)
    expected = beam_search(plain, *given, *shape, candidates=candidates)
    return search(form, *given, shape, candidates), expected


def assert_same(found: ExploredNodes, expected: ExploredNodes) -> None:
    missing = expected.log_probs == -torch.inf
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-5, atol=1e-4)
    for part in ("tokens", "back_pointers"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        assert ours.dtype == theirs.dtype and ours.is_contiguous()
        assert torch.equal(ours[~missing], theirs[~missing])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("requests", "width", "length"), [(1, 1, 1), (1, 4, 2), (3, 4, L)])
@pytest.mark.parametrize("candidates", [0, C])
def test_each_form_finds_the_same_nodes(
    config: HeadConfig, requests: int, width: int, length: int, candidates: int
) -> None:
    plain = random_head(config)
    forms = [plain, packed_form(plain, packed)]
    if isinstance(config, GatedConfig):
        other = OtherGatedHead(config)
        other.load_state_dict(plain.state_dict())
        forms.append(packed_form(other.requires_grad_(False), packed))
    for form in forms:
        assert_same(*both(plain, form, requests, SearchShape(width, length), candidates))


@pytest.mark.parametrize(("tokens", "width"), [(2, 3), (9, 4), (60, 55)])
def test_where_there_are_fewer_continuations_than_beams_the_rest_is_missing(
    tokens: int, width: int
) -> None:
    head = random_head(recurrent(draft_vocab_size=tokens))
    found, expected = both(head, head, 2, SearchShape(width, 3))
    assert (expected.log_probs[:, 0] == -torch.inf).sum() == 2 * max(0, width - min(tokens, 50))
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("candidates", [0, V])
def test_half_precision_is_widened_before_it_is_ranked(candidates: int, dtype: torch.dtype) -> None:
    plain = random_head(recurrent(), dtype)
    found, _ = both(plain, packed_form(plain, packed), 3, SearchShape(4, L), candidates)
    torch.manual_seed(1)
    hidden = torch.randn(3, H).to(dtype).float()
    exact, embed = plain.float(), nn.Embedding(V, H, dtype=dtype).float()
    expected = beam_search(exact, embed, hidden, torch.arange(3), 4, L, candidates=candidates)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0.05, atol=0.2)


def test_of_equally_good_tokens_the_first_are_taken() -> None:
    head = random_head(recurrent())
    head.vocabulary_layer.weight.zero_()
    found, _ = both(head, head, 1, SearchShape(3, 2))
    assert found.tokens.tolist() == [[[0, 1, 2], [0, 1, 2]]]
    assert found.back_pointers.tolist() == [[[0, 0, 0], [0, 0, 0]]]


@pytest.mark.parametrize("candidates", [0, C])
def test_what_is_not_a_number_is_never_drafted(candidates: int) -> None:
    head = random_head(recurrent())
    head.vocabulary_layer.weight[7:].fill_(torch.nan)
    found, _ = both(head, packed_form(head, packed), 1, SearchShape(4, 3), candidates)
    assert (found.tokens < 7).all() and found.log_probs.isfinite().all()


@pytest.mark.parametrize("config", [gated(), recurrent(), GatedConfig(V, H)], ids=str)
def test_no_matrix_is_kept_but_the_vocabulary_layer_s_for_candidates(config: HeadConfig) -> None:
    plain = random_head(config)
    weights = {n: weakref.ref(p) for n, p in plain.named_parameters() if p.dim() > 1}
    layer = plain.vocabulary_layer
    kept = {n for n, p in plain.named_parameters() if p is layer.weight and config.selector}
    fast = packed_form(plain, packed)
    del plain, layer
    gc.collect()
    assert fast.config is config
    assert {n for n, weight in weights.items() if weight() is not None} <= kept


def test_a_layer_is_released_before_the_next_is_packed() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def pack(weight: Tensor, bias: Tensor | None) -> Any:
        assert not any(packed_before() is not None for packed_before in seen)
        seen.append(weakref.ref(weight))
        return packed(weight, bias)

    sizes = MlpSpeculatorConfig(V, H, width=24, num_levels=3, tied=False)
    packed_form(build_head(sizes).requires_grad_(False), pack)
    assert len(seen) == 6


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
    fast, (condition, embedded) = packed_form(deepcopy(plain), packed), torch.randn(2, 3, 1, H)
    torch.testing.assert_close(fast.start(condition, embedded), plain.start(condition, embedded))
    assert not any(isinstance(module, nn.Linear) for module in fast.modules())
