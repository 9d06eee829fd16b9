# SPDX-License-Identifier: Apache-2.0
"""The gated head computes its formula."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from redrafter_testing.models.head_forms import random_head
from vllm_redrafter.heads.gated import GatedConfig, GatedHead
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.heads.registry import NAMES, new_head
from vllm_redrafter.training.training_config import HeadName
from vllm_redrafter.utils.errors import ConfigError

V, H, R, W = 300, 32, 3, 4


def unit(x: Tensor) -> Tensor:
    return H**0.5 * x / (x.square().sum(dim=-1, keepdim=True).sqrt() + EPSILON)


def plain_step(tensors: dict[str, Tensor], state: Tensor, embedded: Tensor) -> Tensor:
    """The formula of the module's docstring, each product by itself."""
    weight, bias = tensors["cell.weight"], tensors["cell.bias"]
    both = unit(embedded) @ weight[:, :H].T + unit(state) @ weight[:, H:].T + bias
    gate = 1 / (1 + (-both[..., :H]).exp())
    candidate = both[..., H:] / (1 + (-both[..., H:]).exp())
    return gate * state + (1 - gate) * candidate


def plain_logits(tensors: dict[str, Tensor], state: Tensor, num_layers: int) -> Tensor:
    for i in range(num_layers):
        x = unit(state) @ tensors[f"blocks.{i}.weight"].T + tensors[f"blocks.{i}.bias"]
        state = state + x / (1 + (-x).exp())
    return (tensors["scale"] * unit(state)) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize(
    "config",
    [
        GatedConfig(V, H, num_draft_layers=0),
        GatedConfig(V, H, num_draft_layers=2),
        GatedConfig(V, H, draft_vocab_size=120),
    ],
    ids=str,
)
def test_states_and_logits_are_the_formulas(config: GatedConfig) -> None:
    head = random_head(config, torch.float64)
    tensors = head.state_dict()
    hidden, first, second = torch.randn(3, R, W, H, dtype=torch.float64)
    state = head.start(head.condition(hidden), first)
    expected = plain_step(tensors, hidden, first)
    torch.testing.assert_close(state, expected)
    expected = plain_step(tensors, expected, second)
    torch.testing.assert_close(head.advance(state, second, 1), expected)
    expected = plain_logits(tensors, hidden, config.num_draft_layers)
    torch.testing.assert_close(head.logits(hidden, hidden, 0), expected)


def test_sizes_that_it_does_not_have_are_refused() -> None:
    for wrong in (-1, 257, True, 1.0):
        with pytest.raises(ConfigError, match="num_draft_layers must be"):
            GatedConfig(V, H, num_draft_layers=wrong)  # type: ignore[arg-type]
    assert new_head("gated", V, H, exit_dim=None).config == GatedConfig(V, H)
    with pytest.raises(ConfigError, match="exit_dim: a redrafter_gated head has no such size"):
        new_head("gated", V, H, exit_dim=2 * H)


def test_train_offers_the_heads_of_this_package() -> None:
    assert get_args(HeadName) == tuple(NAMES)


def test_nothing_but_zeros_gives_numbers() -> None:
    """Engines rehearse on them; and so begins a training on padding."""
    head = GatedHead(GatedConfig(V, H))
    zeros = torch.zeros(R, H, requires_grad=True)
    logits = head.logits(zeros, head.start(zeros, zeros), 0)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
