# SPDX-License-Identifier: Apache-2.0
"""Beam search finds Apple's beams, with Apple's log-probabilities."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from redrafter_testing.algorithm import naive
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search, log_softmax_of_top

HIDDEN = 8
REQUESTS = 3


def apple_checkpoint(
    folder: Path, vocab: int, exit_dim: int, layers: int, rnn: bool, seed: int = 0
) -> dict[str, Tensor]:
    """Write a checkpoint as Apple's `save_pretrained` does; returns its tensors."""
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> Tensor:
        # Large enough for peaked distributions, in which beams outlive and leave one another.
        scale = 2.0 / shape[-1] ** 0.5
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    tensors = {f"lm_head.{layers}.weight": weights(vocab, exit_dim)}
    for layer in range(layers):
        tensors[f"lm_head.{layer}.linear.weight"] = weights(exit_dim, exit_dim)
        tensors[f"lm_head.{layer}.linear.bias"] = weights(exit_dim)
    if exit_dim != 2 * HIDDEN:
        tensors["input_proj.weight"] = weights(exit_dim, 2 * HIDDEN)
        tensors["input_proj.bias"] = weights(exit_dim)
    if rnn:
        tensors["rnn_u.weight"] = weights(HIDDEN, HIDDEN)
        tensors["rnn_u.bias"] = weights(HIDDEN)
        tensors["rnn_w.weight"] = weights(HIDDEN, HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Drafter"],
        "exit_dim": exit_dim,
        "hidden_size": HIDDEN,
        "model_type": "recurrent_drafting_drafter",
        "num_draft_layers": layers,
        "num_lookback_tokens": 2,
        "rnn": rnn,
        "torch_dtype": "float32",
        "transformers_version": "4.38.2",
        "vocab_size": vocab,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def random_requests(vocab: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(the target's embedding [V, H], hidden states [R, H], root tokens [R])."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64)
    hidden = torch.randn(REQUESTS, HIDDEN, generator=generator, dtype=torch.float64)
    roots = torch.randint(vocab, (REQUESTS,), generator=generator)
    return embedding, hidden, roots


def random_search(
    vocab: int, width: int, length: int, seed: int = 0
) -> tuple[RecurrentHead, Tensor, Tensor, Tensor, ExploredNodes]:
    """A drafter without a checkpoint, random requests, and what the search explores for them."""
    torch.manual_seed(seed)
    drafter = RecurrentHead(RecurrentConfig(vocab, HIDDEN, exit_dim=2 * HIDDEN)).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    embedding, hidden, roots = random_requests(vocab, seed)
    explored = beam_search(drafter, embedding.__getitem__, hidden, roots, width, length)
    return drafter, embedding, hidden, roots, explored


def finished_beams(explored: ExploredNodes) -> tuple[Tensor, Tensor]:
    """[R, W, L] tokens, and [R, W, L] cumulative log-probabilities."""
    requests, length, width = explored.tokens.shape
    beam = torch.arange(width).expand(requests, -1)
    tokens, log_probs = [], []
    for level in reversed(range(length)):
        tokens.append(explored.tokens[:, level].gather(1, beam))
        log_probs.append(explored.log_probs[:, level].gather(1, beam))
        beam = explored.back_pointers[:, level].gather(1, beam)
    return torch.stack(tokens[::-1], dim=2), torch.stack(log_probs[::-1], dim=2)


def assert_apples_beams(folder: Path, tensors: dict[str, Tensor], width: int, length: int) -> None:
    """The checkpoint's beams and their log-probabilities are Apple's, for random requests."""
    drafter = load_drafter(str(folder), dtype=torch.float64)
    embedding, hidden, roots = random_requests(drafter.config.vocab_size)
    explored = beam_search(drafter, embedding.__getitem__, hidden, roots, width, length)
    beams, log_probs = finished_beams(explored)
    assert beams.shape == log_probs.shape == (REQUESTS, width, length)
    # Apple's beam length counts the init token, ours does not.
    apples_length = length + 1
    for request in range(REQUESTS):
        expected_beams, expected_log_probs = naive.apple_beam_search(
            tensors, embedding, hidden[request], int(roots[request]), width, apples_length
        )
        assert beams[request].tolist() == [beam[1:] for beam in expected_beams]
        torch.testing.assert_close(
            log_probs[request], torch.tensor(expected_log_probs), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("vocab", "exit_dim", "layers", "rnn"),
    [
        (7, 2 * HIDDEN, 1, True),
        (7, 12, 2, False),
        (60, 12, 1, True),
        (60, 2 * HIDDEN, 0, False),
        (200, 24, 2, True),
    ],
)
@pytest.mark.parametrize(("width", "length"), [(1, 4), (4, 5), (7, 3)])
def test_an_apple_checkpoint_gives_apples_beams_and_log_probs(
    tmp_path: Path, vocab: int, exit_dim: int, layers: int, rnn: bool, width: int, length: int
) -> None:
    tensors = apple_checkpoint(tmp_path, vocab, exit_dim, layers, rnn)
    assert_apples_beams(tmp_path, tensors, width, length)


def test_slots_that_no_beam_fills_are_dead() -> None:
    *_, explored = random_search(vocab=2, width=5, length=3)
    live = (explored.log_probs > -torch.inf).sum(dim=2)
    assert live.tolist() == [[2, 4, 5]] * REQUESTS
    *_, explored = random_search(vocab=1, width=2, length=3)
    live = (explored.log_probs > -torch.inf).sum(dim=2)
    assert live.tolist() == [[1, 1, 1]] * REQUESTS
    assert not explored.log_probs.isnan().any()


@pytest.mark.parametrize("num", [1, 4, 50])
@pytest.mark.parametrize("vocab", [50, 51, 300])
def test_log_softmax_of_top_is_masking_and_log_softmax_in_full(vocab: int, num: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(2, 3, vocab) * 3
    log_probs, tokens = log_softmax_of_top(logits, num)
    assert log_probs.shape == tokens.shape == (2, 3, num)
    assert log_probs.dtype == torch.float32
    for i, j in itertools.product(range(2), range(3)):
        full = torch.tensor(naive.apple_log_probs(logits[i, j]))
        best = sorted(range(vocab), key=lambda token: -full[token])[:num]
        assert tokens[i, j].tolist() == best
        torch.testing.assert_close(log_probs[i, j], full[best], check_dtype=False)


@pytest.mark.parametrize("vocab", [1, 3, 49])
def test_log_softmax_of_top_marks_what_a_small_vocabulary_lacks(vocab: int) -> None:
    logits = torch.randn(2, vocab)
    log_probs, tokens = log_softmax_of_top(logits, 50)
    assert log_probs.shape == tokens.shape == (2, 50)
    expected, order = logits.log_softmax(dim=1).sort(dim=1, descending=True)
    torch.testing.assert_close(log_probs[:, :vocab], expected)
    assert torch.equal(tokens[:, :vocab], order)
    assert (log_probs[:, vocab:] == -torch.inf).all()
    assert (tokens[:, vocab:] == 0).all()
