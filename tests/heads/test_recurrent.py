# SPDX-License-Identifier: Apache-2.0
"""The draft head computes Apple's formulas, for every variant of its architecture."""

import itertools

import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm import naive
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

VOCAB, HIDDEN, REQUESTS, BEAMS = 11, 6, 3, 4

VARIANTS = [
    RecurrentConfig(VOCAB, HIDDEN, exit_dim, num_draft_layers=layers, rnn=rnn)
    for rnn, exit_dim, layers in itertools.product([True, False], [2 * HIDDEN, 9], [0, 1, 2])
]
every_variant = pytest.mark.parametrize(
    "config",
    VARIANTS,
    ids=lambda c: f"{'rnn' if c.rnn else 'sum'}-exit{c.exit_dim}-layers{c.num_draft_layers}",
)


def random_drafter(config: RecurrentConfig) -> RecurrentHead:
    torch.manual_seed(0)
    drafter = RecurrentHead(config).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    return drafter.requires_grad_(False)


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@every_variant
def test_step_is_apples_recurrence(config: RecurrentConfig) -> None:
    drafter = random_drafter(config)
    state, embedded = random_tensor(REQUESTS, BEAMS, HIDDEN), random_tensor(REQUESTS, BEAMS, HIDDEN)
    expected = naive.drafter_step(drafter.state_dict(), state, embedded)
    torch.testing.assert_close(drafter.advance(state, embedded), expected)
    started = drafter.start(drafter.condition(embedded), embedded)
    torch.testing.assert_close(started, drafter.advance(torch.zeros_like(embedded), embedded))


@every_variant
def test_logits_are_apples_head_over_hidden_and_state(config: RecurrentConfig) -> None:
    drafter = random_drafter(config)
    hidden, state = random_tensor(REQUESTS, BEAMS, HIDDEN), random_tensor(REQUESTS, BEAMS, HIDDEN)
    expected = naive.drafter_logits(drafter.state_dict(), hidden, state)
    logits = drafter.logits(drafter.condition(hidden), state, 0)
    assert logits.shape == (REQUESTS, BEAMS, VOCAB)
    torch.testing.assert_close(logits, expected)


@every_variant
def test_parameters_have_apples_names_and_shapes(config: RecurrentConfig) -> None:
    exit_dim, layers = config.exit_dim, config.num_draft_layers
    expected: dict[str, tuple[int, ...]] = {f"lm_head.{layers}.weight": (VOCAB, exit_dim)}
    for layer in range(layers):
        expected[f"lm_head.{layer}.linear.weight"] = (exit_dim, exit_dim)
        expected[f"lm_head.{layer}.linear.bias"] = (exit_dim,)
    if exit_dim != 2 * HIDDEN:
        expected["input_proj.weight"] = (exit_dim, 2 * HIDDEN)
        expected["input_proj.bias"] = (exit_dim,)
    if config.rnn:
        expected["rnn_u.weight"] = expected["rnn_w.weight"] = (HIDDEN, HIDDEN)
        expected["rnn_u.bias"] = (HIDDEN,)
    found = {name: tuple(t.shape) for name, t in RecurrentHead(config).state_dict().items()}
    assert found == expected
