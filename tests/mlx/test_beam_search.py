# SPDX-License-Identifier: Apache-2.0
"""A beam search in MLX finds the nodes and the trees that it finds in torch."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
import torch

from redrafter_testing.models.head_forms import FORMS, H, V, write_random
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.mlx.beam_search import beam_search, log_softmax_of_top
from vllm_redrafter.mlx.heads import Head, load_head
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.beam_search import beam_search as torch_beam_search
from vllm_redrafter.tree.token_tree import TokenTree

Floats = npt.NDArray[np.float32]

R = 3
SHAPES = [(1, 1), (1, 4), (2, 3), (4, 1), (4, 4), (7, 3)]

every_form = pytest.mark.parametrize("config", FORMS.values(), ids=FORMS.keys())
every_shape = pytest.mark.parametrize(("width", "length"), SHAPES)


def read(folder: Path | str, dtype: mx.Dtype) -> Any:
    return load_head(Checkpoint.open(str(folder)), dtype)


def requests(config: HeadConfig) -> tuple[Floats, Floats, list[int]]:
    """(the target's embedding [vocabulary, H], hidden states [R, (1 + n) H], R root tokens)."""
    random = np.random.default_rng(1)
    embedding = random.standard_normal((config.vocab_size, config.hidden_size))
    hidden = random.standard_normal((R, config.hidden_width))
    roots = random.integers(config.vocab_size, size=R).tolist()
    return embedding.astype(np.float32), hidden.astype(np.float32), roots


def in_mlx(
    head: Head, embedding: Floats, hidden: Floats, roots: list[int], width: int, length: int
) -> ExploredNodes:
    """Each request's search, side by side."""
    embed = mx.array(embedding).__getitem__
    found = [
        beam_search(head, embed, mx.array(hidden[r]), mx.array(roots[r]), width, length)
        for r in range(R)
    ]
    parts = [
        torch.from_numpy(np.stack([np.array(a) for a in part])) for part in zip(*found, strict=True)
    ]
    tokens, back_pointers, log_probs = parts
    assert tokens.dtype == back_pointers.dtype == torch.int32
    assert log_probs.dtype == torch.float32
    return ExploredNodes(tokens.long(), back_pointers.long(), log_probs)


def assert_same(roots: list[int], found: ExploredNodes, expected: ExploredNodes) -> None:
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-4)
    # What stands in slots that no beam fills is not read.
    live = expected.log_probs > -torch.inf
    assert torch.equal(found.tokens[live], expected.tokens[live])
    assert torch.equal(found.back_pointers[live], expected.back_pointers[live])
    for max_nodes in (1, 5, live[0].numel()):
        ours, torchs = (
            TokenTree.from_explored(torch.tensor(roots), explored, max_nodes)
            for explored in (found, expected)
        )
        for part in ("tokens", "parents", "depths", "num_nodes"):
            assert torch.equal(getattr(ours, part), getattr(torchs, part)), part


@every_form
@every_shape
def test_nodes_and_trees_are_torchs(
    config: HeadConfig, width: int, length: int, tmp_path: Path
) -> None:
    reference = write_random(config, tmp_path)
    head, (embedding, hidden, roots) = read(tmp_path, mx.float32), requests(config)
    embed, given = torch.from_numpy(embedding).__getitem__, torch.from_numpy(hidden)
    expected = torch_beam_search(reference, embed, given, torch.tensor(roots), width, length)
    assert_same(roots, in_mlx(head, embedding, hidden, roots, width, length), expected)


@every_form
def test_nothing_is_evaluated_in_a_search(config: HeadConfig, tmp_path: Path) -> None:
    """MLX refuses to evaluate anything while it traces a function."""
    write_random(config, tmp_path)
    head, (embedding, hidden, roots) = read(tmp_path, mx.float32), requests(config)
    embed = mx.array(embedding).__getitem__

    def search(hidden: mx.array, root: mx.array) -> list[mx.array]:
        return list(beam_search(head, embed, hidden, root, 4, 4))

    found = mx.compile(search)(mx.array(hidden[0]), mx.array(roots[0]))
    assert [array.shape for array in found] == [(4, 4)] * 3


@pytest.mark.parametrize("levels", [1, 3, 40])
@pytest.mark.parametrize("vocab", [20, 51, 300, 1000, 8192])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_of_equal_logits_the_smaller_token_comes_first(
    levels: int, vocab: int, dtype: mx.Dtype
) -> None:
    """Also where more than 50 are equal; that is common in bf16."""
    logits = np.random.default_rng(vocab).integers(levels, size=(3, vocab))
    log_probs, tokens = log_softmax_of_top(mx.array(logits).astype(dtype), 50)
    columns = logits.tolist(), tokens.tolist(), log_probs.tolist()
    for row, found, scores in zip(*columns, strict=True):
        order = sorted(range(vocab), key=lambda token: (-row[token], token))[:50]
        assert found[: len(order)] == order
        top = torch.tensor([float(row[token]) for token in order])
        assert scores[: len(order)] == pytest.approx(top.log_softmax(dim=0).tolist(), abs=1e-5)


def test_of_numbers_that_overflow_tokens_stay_within_the_vocabulary() -> None:
    """MLX does not check what it looks up by them."""
    logits = mx.where(mx.arange(301) == 300, 1.0, mx.nan)
    _, tokens = log_softmax_of_top(logits[None], 50)
    assert tokens.max() < 301


def test_of_equally_probable_nodes_the_better_beams_child_comes_first(tmp_path: Path) -> None:
    """Whatever its token."""
    write_random(GatedConfig(V, H), tmp_path)
    head = read(tmp_path, mx.float32)
    head.vocabulary.weight = mx.zeros_like(head.vocabulary.weight)
    embedding, hidden, roots = requests(head.config)
    given = mx.array(embedding).__getitem__, mx.array(hidden[0]), mx.array(roots[0])
    found = beam_search(head, *given, 3, 3)
    assert found.tokens.tolist() == [[0, 1, 2]] * 3
    assert found.back_pointers.tolist() == [[0, 0, 0]] * 3
