"""The loop end to end, on a language whose every continuation is known."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.training.cycle_language import HIDDEN_SIZE, VOCAB_SIZE, CycleTarget, texts
from vllm_redrafter.config import ConfigError, DrafterConfig, ReDrafterConfig
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.training.data import TokenBlocks
from vllm_redrafter.training.distillation import LossKind
from vllm_redrafter.training.estimate import estimate_acceptance
from vllm_redrafter.training.trainer import (
    TrainingConfig,
    TrainingResult,
    new_drafter,
    train_drafter,
    warmup_cosine,
)

L = 4
SPECULATION = ReDrafterConfig(num_speculative_tokens=L, beam_width=1, beam_length=L)


def cycle_blocks() -> TokenBlocks:
    """Answers after a prompt of 5 tokens, a whole number of full steps long."""
    tokens = texts(num=20, length=5 + 1 + 6 * (L + 1))
    generated = torch.ones_like(tokens, dtype=torch.bool)
    generated[:, :5] = False
    return TokenBlocks(tokens, generated)


def untrained() -> Drafter:
    torch.manual_seed(0)
    return Drafter(DrafterConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=32))


def train(
    drafter: Drafter, kind: LossKind = "kl", num_steps: int = 100, **settings: Any
) -> TrainingResult:
    config = TrainingConfig(
        num_steps=num_steps,
        batch_size=10,
        unroll_steps=L,
        loss=kind,
        learning_rate=1e-2,
        **settings,
    )
    quiet = Console(file=io.StringIO())
    blocks = cycle_blocks()
    return train_drafter(drafter, CycleTarget(), blocks, blocks, config, SPECULATION, quiet)


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_a_trained_drafter_predicts_a_certain_language(kind: LossKind) -> None:
    """Training and inference must agree on which hidden state goes with which root."""
    drafter = untrained()
    before = estimate_acceptance(drafter, CycleTarget(), cycle_blocks(), SPECULATION)
    assert before.tokens_per_step < 2
    result = train(drafter, kind)
    assert result.loss < 0.2
    assert result.tokens_per_step == L + 1
    assert not drafter.training


def test_training_is_repeatable_and_the_seed_matters() -> None:
    results = [untrained() for _ in range(3)]
    for drafter, seed in zip(results, (0, 0, 1), strict=True):
        train(drafter, num_steps=3, seed=seed)
    first, same, other = (d.rnn_w.weight for d in results)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_reduced_precision_trains_float32_parameters() -> None:
    drafter = untrained()
    before = drafter.rnn_w.weight.clone()
    train(drafter, num_steps=2, autocast=torch.bfloat16)
    assert drafter.rnn_w.weight.dtype == torch.float32
    assert not torch.equal(drafter.rnn_w.weight, before)


def test_schedule_warms_up_and_decays_to_zero() -> None:
    factors = [warmup_cosine(step, 4, 20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0 and factors[12] == pytest.approx(0.5)
    assert factors[20] == pytest.approx(0.0)
    assert all(a >= b for a, b in itertools.pairwise(factors[4:]))


@pytest.mark.parametrize("name", ["num_steps", "batch_size", "unroll_steps", "evaluate_every"])
def test_counts_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be at least 1, got 0"):
        TrainingConfig(**{"num_steps": 5, name: 0})


def test_new_drafter_starts_from_the_targets_head() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    target = LlamaForCausalLM(config)
    drafter = new_drafter(target, exit_dim=8)
    assert torch.equal(drafter.lm_head[-1].weight, target.lm_head.weight)
    assert drafter.lm_head[-1].weight is not target.lm_head.weight
    assert new_drafter(target, exit_dim=6).lm_head[-1].weight.shape == (20, 6)
