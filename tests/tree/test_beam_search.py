# SPDX-License-Identifier: Apache-2.0
"""Beam search finds Apple's beams, with Apple's log-probabilities."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from redrafter_testing.algorithm import naive
from redrafter_testing.models.head_forms import random_head
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search

HIDDEN = 8
REQUESTS = 3


def apple_checkpoint(
    folder: Path, vocab: int, exit_dim: int, layers: int, rnn: bool
) -> dict[str, Tensor]:
    """Write a checkpoint as Apple's `save_pretrained` does; returns its tensors."""
    sizes = {"exit_dim": exit_dim, "num_draft_layers": layers, "rnn": rnn}
    config = {"hidden_size": HIDDEN, "vocab_size": vocab, "num_lookback_tokens": 2, **sizes}
    tensors = random_head(RecurrentConfig.from_dict(config), torch.float64).state_dict()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    others = {"model_type": "recurrent_drafting_drafter", "architectures": ["Drafter"]}
    (folder / "config.json").write_text(json.dumps(config | others))
    return tensors


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
    drafter = load_drafter(str(tmp_path), dtype=torch.float64)
    embedding = torch.randn(vocab, HIDDEN, dtype=torch.float64)
    hidden = torch.randn(REQUESTS, HIDDEN, dtype=torch.float64)
    roots = torch.randint(vocab, (REQUESTS,))
    explored = beam_search(drafter, embedding.__getitem__, hidden, roots, width, length)
    beams, log_probs = finished_beams(explored)
    assert beams.shape == log_probs.shape == (REQUESTS, width, length)
    for request in range(REQUESTS):
        # Apple's beam length counts the init token, ours does not.
        expected_beams, expected_log_probs = naive.apple_beam_search(
            tensors, embedding, hidden[request], int(roots[request]), width, length + 1
        )
        assert beams[request].tolist() == [beam[1:] for beam in expected_beams]
        torch.testing.assert_close(
            log_probs[request], torch.tensor(expected_log_probs), rtol=1e-5, atol=1e-5
        )
