# SPDX-License-Identifier: Apache-2.0
"""The distillation loss against a loop over positions, and its alignment."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.heads.speculators import MlpSpeculator, MlpSpeculatorConfig
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.target import TargetOutputs
from vllm_redrafter.training import chunked_loss
from vllm_redrafter.training.distillation import Distillation, count_rows
from vllm_redrafter.utils.errors import ConfigError

B, T, H, V, L = 2, 9, 6, 7, 3
KEPT = torch.tensor([0, 2, 3, 6])


@pytest.fixture(params=["rnn", "sum", "reduced vocabulary", "weights by depth"])
def drafter(request: pytest.FixtureRequest) -> DraftHead:
    torch.manual_seed(0)
    if request.param == "weights by depth":
        return MlpSpeculator(MlpSpeculatorConfig(V, H, width=5, num_levels=L, tied=False)).double()
    reduced = request.param == "reduced vocabulary"
    config = RecurrentConfig(
        V, H, exit_dim=5, rnn=request.param != "sum", draft_vocab_size=4 if reduced else None
    )
    drafter = RecurrentHead(config).double()
    if reduced:
        drafter.keep_tokens(KEPT)
    return drafter


@pytest.fixture
def batch() -> TextBatch:
    """A prompt, an answer, a second prompt; and a row whose answer is long."""
    generator = torch.Generator().manual_seed(2)
    generated = torch.ones(B, T, dtype=torch.bool)
    generated[0, :2] = generated[0, 6:7] = generated[1, :1] = False
    return TextBatch(
        torch.randint(V, (B, T), generator=generator), generated, torch.arange(T).expand(B, T)
    )


@pytest.fixture
def target(batch: TextBatch) -> TargetOutputs:
    torch.manual_seed(3)
    embedding = torch.randn(V, H).double()
    return TargetOutputs(torch.randn(B, T, H).double(), embedding[batch.tokens])


@pytest.fixture(params=[10**9, 3 * V], ids=["one chunk", "chunks of three rows"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CPU_CHUNK_ELEMENTS", request.param)


HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(7)).double()


def head(hidden: Tensor) -> Tensor:
    return hidden @ HEAD.T


def states_from(
    drafter: DraftHead, batch: TextBatch, target: TargetOutputs, row: int, start: int
) -> list[Tensor]:
    """s_1 .. s_L of one start, token by token; fewer near the end of the text."""
    states: list[Tensor] = []
    condition = drafter.condition(target.hidden[row, start])
    for position in range(start + 1, min(start + L + 1, T)):
        embed = drafter.embedding_of(lambda _: target.embedded[row], len(states))
        embedded = embed(batch.tokens[row])[position]
        states.append(
            drafter.advance(states[-1], embedded, len(states))
            if states
            else drafter.start(condition, embedded)
        )
    return states


def taught(kind: str, batch: TextBatch, target: TargetOutputs, row: int, label: int) -> Tensor:
    """[V], what the drafter is taught to say in place of the token at `label`."""
    text = torch.nn.functional.one_hot(batch.tokens[row, label], V).double()
    if kind == "ce":
        return text
    probs = head(target.hidden[row, label - 1]).softmax(dim=-1)
    return probs if kind == "kl" else 0.25 * probs + 0.75 * text


def naive_loss(drafter: DraftHead, batch: TextBatch, target: TargetOutputs, kind: str) -> Tensor:
    """[L], one position, one step, one row at a time; all logits by `drafter.logits`."""
    sums = [torch.zeros(()).double() for _ in range(L)]
    kept = drafter.target_tokens(torch.arange(drafter.config.num_ranked_tokens))
    for row, start in product(range(B), range(T)):
        for index, state in enumerate(states_from(drafter, batch, target, row, start)):
            label = start + 2 + index
            if label >= T or not batch.generated[row, start + 1 : label + 1].all():
                continue
            logits = drafter.logits(drafter.condition(target.hidden[row, start]), state, index)
            t = taught(kind, batch, target, row, label)[kept]
            sums[index] = sums[index] + (torch.xlogy(t, t) - t * logits.log_softmax(-1)).sum()
    return torch.stack(sums)


SHARES = {"kl": 1.0, "ce": 0.0, "mix": 0.25}


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.usefixtures("chunks")
def test_loss_and_gradients_are_those_of_a_loop_over_positions(
    drafter: DraftHead, batch: TextBatch, target: TargetOutputs, kind: str
) -> None:
    weights = torch.tensor([0.5, 0.3, 0.2]).double()
    expected = naive_loss(drafter, batch, target, kind)
    parameters = dict(drafter.named_parameters())
    gradients = torch.autograd.grad((expected * weights).sum() * 3.0, list(parameters.values()))

    loss = Distillation(drafter, head, L, SHARES[kind])(batch, target, weights)
    (loss.total * 3.0).backward()

    # A speculator's cell computes in float32.
    rtol, atol = (1e-10, 1e-12) if isinstance(drafter, RecurrentHead) else (1e-4, 1e-5)
    close: dict[str, Any] = {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(loss.per_step, expected.detach(), **close)
    torch.testing.assert_close(loss.total, (expected * weights).sum(), **close)
    assert count_rows(batch.generated, L).tolist() == [11, 8, 6]
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(parameter.grad, gradient, **close)
    assert target.hidden.grad is None and target.embedded.grad is None


def test_a_batch_without_counted_positions_gives_zero_gradients(
    drafter: DraftHead, batch: TextBatch, target: TargetOutputs
) -> None:
    nothing = TextBatch(batch.tokens, torch.zeros_like(batch.generated), batch.positions)
    loss = Distillation(drafter, head, L)(nothing, target, torch.ones(L).double())
    loss.total.backward()
    assert loss.total == 0.0
    for parameter in drafter.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_too_short_a_text_is_refused(batch: TextBatch, target: TargetOutputs) -> None:
    drafter = RecurrentHead(RecurrentConfig(V, H, exit_dim=5)).double()
    with pytest.raises(ConfigError, match=r"8 steps need blocks of at least 10 tokens, got 9"):
        Distillation(drafter, head, 8)(batch, target, torch.ones(8))
