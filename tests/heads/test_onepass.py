"""The head that reads the vocabulary once computes its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_redrafter.heads.gated import GatedConfig, GatedHead
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.heads.onepass import GATED, UNCORRECTED, OnePassConfig, OnePassHead
from vllm_redrafter.heads.registry import build_head, head_config, new_head
from vllm_redrafter.utils.errors import ConfigError

V, H, S, K, LEVELS = 60, 16, 6, 5, 4
CONFIG = OnePassConfig(V, H, levels=LEVELS, state_size=S, base_rank=K)


def random_head() -> OnePassHead:
    torch.manual_seed(0)
    head = OnePassHead(CONFIG).double().eval().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def unit(x: Tensor) -> Tensor:
    return len(x) ** 0.5 * x / (x.norm() + EPSILON)


def gated(mixed: Tensor, before: Tensor) -> Tensor:
    gate, candidate = mixed.chunk(2)
    gate = 1 / (1 + (-gate).exp())
    return gate * before + (1 - gate) * candidate / (1 + (-candidate).exp())


def formula(head: OnePassHead, hidden: Tensor, path: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Logits after the root and the drafted tokens, of embeddings; and what the root told."""
    w = head.state_dict()
    root, *drafted = path
    cell = w["cell.weight"] @ torch.cat([unit(root), unit(hidden)]) + w["cell.bias"]
    s = gated(cell, hidden)
    u = w["first.weight"] @ unit(s) + w["first.bias"]
    for e in drafted:
        u = gated(w["mix.weight"] @ torch.cat([unit(e), unit(u)]) + w["mix.bias"], u)
    told = y = s
    if drafted:
        rows = slice((len(drafted) - 1) * K, len(drafted) * K)
        inner = w["base.down.weight"][rows] @ unit(s) + w["base.down.bias"][rows]
        told = s + w["base.up"][len(drafted) - 1] @ (inner / (1 + (-inner).exp()))
        kept, change = (w["change.weight"] @ u + w["change.bias"]).chunk(2)
        y = told / (1 + (-kept).exp()) + change
    return tuple(w["lm_head.weight"] @ (w["scale"] * unit(x)) for x in (y, told))  # type: ignore[return-value]


def test_logits_down_a_path_and_what_the_root_tells_are_the_formulas() -> None:
    head = random_head()
    hidden = torch.randn(H, dtype=torch.float64)
    path = [torch.randn(H, dtype=torch.float64) for _ in range(LEVELS)]
    state = root = head.start(head.condition(hidden), path[0])
    told = head.vocabulary_layers[0](head.base_features(hidden, root, LEVELS))
    for depth in range(LEVELS):
        if depth:
            state = head.advance(state, path[depth])
        logits, of_root = formula(head, hidden, path[: depth + 1])
        torch.testing.assert_close(head.logits(hidden, state, depth), logits)
        torch.testing.assert_close(told[depth], of_root)


def test_training_teaches_some_rows_what_the_root_tells_and_some_the_gated_heads() -> None:
    head, gated = random_head().train(), GatedHead(GatedConfig(V, H)).double()
    gated.load_state_dict({n: head.state_dict()[n] for n in gated.state_dict()})
    condition, embedded, second = torch.randn(3, 4000, H, dtype=torch.float64)
    state = head.advance(head.start(condition, embedded), second)
    features = head.features(condition, state, 1)
    told = head.base_features(condition, state, 2)[:, 1]
    by_gated = gated.advance(gated.start(condition, embedded), second)
    for expected, share in (
        (told, UNCORRECTED),
        (gated.features(condition, by_gated, 1), GATED),
        (head.eval().features(condition, state, 1), 1 - GATED - UNCORRECTED),
    ):
        found = torch.isclose(features, expected, rtol=1e-9).all(dim=-1).double().mean()
        assert 0.7 * share < found < 1.3 * share
    first = head.features(condition, state, 0)
    assert head.train().features(condition, state, 0).equal(first)


def test_a_new_one_is_as_long_as_its_drafts_and_about_a_third_as_wide() -> None:
    config = new_head("onepass", V, 32, 3).config
    assert config == OnePassConfig(V, 32, levels=3, state_size=16, base_rank=8)
    wide = new_head("onepass", V, 4096).config
    assert isinstance(wide, OnePassConfig) and wide.state_size == 1280
    assert config.max_beam_length == 3 and config.selected_depths == 2
    config.require_beam_length("here", 3)
    with pytest.raises(ConfigError, match="exceeds the 3 tokens"):
        config.require_beam_length("here", 4)


def test_its_config_is_read_and_checked() -> None:
    sizes = {"levels": LEVELS, "state_size": S, "base_rank": K}
    values = {"model_type": "redrafter_onepass", "vocab_size": V, "hidden_size": H, **sizes}
    assert head_config(values) == CONFIG
    assert isinstance(build_head(head_config(values)), OnePassHead)
    for name, wrong in (("levels", 1), ("levels", 1000), ("state_size", 0), ("base_rank", True)):
        with pytest.raises(ConfigError, match=name):
            head_config(values | {name: wrong})
    with pytest.raises(ConfigError, match="takes none"):
        head_config(values | {"selector": {"depths": 3, "rank": 2}})
