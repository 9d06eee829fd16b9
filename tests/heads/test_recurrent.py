# SPDX-License-Identifier: Apache-2.0
"""The draft head computes Apple's formulas, for every variant of its architecture."""

import itertools

import pytest
import torch

from redrafter_testing.algorithm import naive
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

VOCAB, HIDDEN, REQUESTS, BEAMS = 11, 6, 3, 4

VARIANTS = [
    RecurrentConfig(VOCAB, HIDDEN, exit_dim, num_draft_layers=layers, rnn=rnn)
    for rnn, exit_dim, layers in itertools.product([True, False], [2 * HIDDEN, 9], [0, 1, 2])
]


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_states_and_logits_are_apples(config: RecurrentConfig) -> None:
    torch.manual_seed(0)
    head = RecurrentHead(config).double().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    tensors = head.state_dict()
    hidden, state, embedded = torch.randn(3, REQUESTS, BEAMS, HIDDEN, dtype=torch.float64)
    condition = head.condition(hidden)
    started = naive.drafter_step(tensors, torch.zeros_like(state), embedded)
    torch.testing.assert_close(head.start(condition, embedded), started)
    expected = naive.drafter_step(tensors, state, embedded)
    torch.testing.assert_close(head.advance(state, embedded), expected)
    expected = naive.drafter_logits(tensors, hidden, state)
    torch.testing.assert_close(head.logits(condition, state, 0), expected)
