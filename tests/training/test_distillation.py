"""The distillation loss against a loop over positions, and its alignment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_redrafter.config import ConfigError, DrafterConfig
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.training.distillation import (
    LossKind,
    cross_entropy,
    distillation_loss,
    kl_divergence,
    unroll,
)
from vllm_redrafter.training.target import TargetOutputs

B, T, H, V, L = 2, 9, 6, 7, 3


@pytest.fixture(params=[True, False], ids=["rnn", "sum"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    torch.manual_seed(0)
    return Drafter(DrafterConfig(V, H, exit_dim=5, rnn=request.param)).double()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def target(tokens: Tensor) -> TargetOutputs:
    torch.manual_seed(3)
    embedding = torch.randn(V, H).double()
    hidden, logits = torch.randn(B, T, H).double(), torch.randn(B, T, V).double()
    return TargetOutputs(hidden, embedding[tokens], logits)


def states_from(drafter: Drafter, target: TargetOutputs, row: int, start: int) -> list[Tensor]:
    """s_1 .. s_L of one start, token by token; fewer near the end of the text."""
    states: list[Tensor] = []
    for position in range(start + 1, min(start + L + 1, T)):
        previous = states[-1] if states else None
        states.append(drafter.step(previous, target.embedded[row, position]))
    return states


def naive_loss(
    drafter: Drafter,
    tokens: Tensor,
    target: TargetOutputs,
    generated: Tensor,
    kind: LossKind,
) -> Tensor:
    """[L], one position, one step, one row at a time."""
    sums, counts = torch.zeros(L).double(), torch.zeros(L)
    for row in range(B):
        for start in range(T):
            for index, state in enumerate(states_from(drafter, target, row, start)):
                label = start + 2 + index
                if label >= T or not generated[row, start + 1 : label + 1].all():
                    continue
                logits = drafter.logits(drafter.condition(target.hidden[row, start]), state)
                log_q = logits.log_softmax(-1)
                log_p = target.logits[row, label - 1].log_softmax(-1)
                kl = (log_p.exp() * (log_p - log_q)).sum()
                sums[index] += kl if kind == "kl" else -log_q[tokens[row, label]]
                counts[index] += 1
    return sums / counts.clamp(min=1)


def test_unroll_is_step_after_step(drafter: Drafter, target: TargetOutputs) -> None:
    unrolled = list(unroll(drafter, target.embedded, L))
    assert [s.shape for s in unrolled] == [(B, T - j, H) for j in range(1, L + 1)]
    for row in range(B):
        for start in range(T - 1):
            for index, state in enumerate(states_from(drafter, target, row, start)):
                torch.testing.assert_close(unrolled[index][row, start], state)


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_is_that_of_a_loop_over_positions(
    drafter: Drafter, tokens: Tensor, target: TargetOutputs, kind: LossKind, masked: bool
) -> None:
    generated = torch.ones(B, T, dtype=torch.bool)
    if masked:
        # A prompt, an answer, a second prompt; and a row whose answer is long.
        generated[0, :2] = generated[0, 6:7] = generated[1, :3] = False
    loss = distillation_loss(drafter, tokens, target, L, generated if masked else None, kind)
    expected = naive_loss(drafter, tokens, target, generated, kind)
    torch.testing.assert_close(loss.per_step, expected.detach())
    torch.testing.assert_close(loss.total, expected.mean())


def test_gradients_reach_every_parameter_and_nothing_else(
    tokens: Tensor, target: TargetOutputs
) -> None:
    drafter = Drafter(DrafterConfig(V, H, exit_dim=5)).double()
    distillation_loss(drafter, tokens, target, L).total.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert target.hidden.grad is None and target.embedded.grad is None


def test_teacher_and_text_are_aligned(
    drafter: Drafter, tokens: Tensor, target: TargetOutputs
) -> None:
    """A teacher that is certain of the text makes KL the cross-entropy."""
    certain = torch.nn.functional.one_hot(tokens.roll(-1, dims=1), V) * 1e4
    target = TargetOutputs(target.hidden, target.embedded, certain.double())
    kl = distillation_loss(drafter, tokens, target, L, kind="kl")
    ce = distillation_loss(drafter, tokens, target, L, kind="ce")
    torch.testing.assert_close(kl.per_step, ce.per_step)


def test_kl_of_equal_distributions_is_zero() -> None:
    logits = torch.randn(4, V, dtype=torch.float64)
    shifted = logits + 3.0
    torch.testing.assert_close(kl_divergence(logits, shifted), torch.tensor(0.0).double())
    assert kl_divergence(logits, -logits) > 0


def test_no_counted_position_gives_zero_loss(tokens: Tensor, target: TargetOutputs) -> None:
    drafter = Drafter(DrafterConfig(V, H, exit_dim=5)).double()
    none = torch.zeros(B, T, dtype=torch.bool)
    assert distillation_loss(drafter, tokens, target, L, none).total == 0.0
    assert cross_entropy(torch.empty(0, V), torch.empty(0, dtype=torch.int64)) == 0.0


def test_too_short_a_text_is_refused(
    drafter: Drafter, tokens: Tensor, target: TargetOutputs
) -> None:
    with pytest.raises(ConfigError, match=r"8 steps need blocks of at least 10 tokens, got 9"):
        distillation_loss(drafter, tokens, target, 8)
