# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads: their mathematics, the trees that a search makes of them, and serving."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrafter_testing.algorithm.naive import apple_log_probs, silu
from redrafter_testing.models.cycle_language import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    WORD,
    CycleTarget,
    rows,
)
from redrafter_testing.models.medusa_heads import HEADS, SIZES, VLLM, H, V, medusa, write
from redrafter_testing.models.tiny_models import make_medusa
from vllm_redrafter import ConfigError, ReDrafterConfig
from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.engine.speculative_config import Request, request_for, validated
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.evaluation.evaluate import evaluate_shapes, top_accuracy
from vllm_redrafter.heads.medusa import MedusaConfig, MedusaHead
from vllm_redrafter.heads.registry import is_head
from vllm_redrafter.training.distillation import Distillation
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.policy import SearchShape


def inputs(requests: int = 2) -> tuple[nn.Embedding, Tensor, Tensor]:
    """(embedding, hidden states, root tokens)."""
    torch.manual_seed(1)
    embed = nn.Embedding(V, H).requires_grad_(False)
    return embed, torch.randn(requests, H), torch.arange(requests)


def expected_logits(head: MedusaHead, hidden: Tensor, number: int) -> Tensor:
    """Of one head, by the paper's formula."""
    tensors, x = head.state_dict(), hidden
    for layer in range(head.config.num_draft_layers):
        name = f"blocks.{number}.layers.{layer}"
        x = x + silu(x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(())))
    shared = head.config.shared_output
    return x @ tensors["lm_head.weight" if shared else f"lm_heads.{number}.weight"].T


# Mathematics


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_level_s_logits_are_its_head_s_whatever_was_drafted(sizes: dict[str, Any]) -> None:
    head = medusa(**sizes)
    embed, hidden, roots = inputs()
    condition = head.condition(hidden)
    state = head.start(condition, embed(roots))
    for depth in range(HEADS):
        found = head.logits(condition, state, depth)
        torch.testing.assert_close(found, expected_logits(head, hidden, depth))
        state = head.advance(state, embed(roots + depth))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_heads": 0},
        {"num_heads": True},
        {"num_heads": 128},
        {"num_heads": 2, "num_draft_layers": -1},
        {"num_heads": 2, "num_draft_layers": 257},
        {"num_heads": 2, "bias": 1},
        {"num_heads": 2, "shared_output": "yes"},
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(sizes)[-1]):
        MedusaConfig(V, H, **sizes)


# Search


def cartesian_paths(head: MedusaHead, hidden: Tensor) -> list[dict[tuple[int, ...], float]]:
    """For each level all paths of one request, with their summed log-probabilities."""
    levels: list[dict[tuple[int, ...], float]] = []
    ranked = []
    for number in range(HEADS):
        log_probs = torch.tensor(apple_log_probs(expected_logits(head, hidden, number)))
        best = log_probs.topk(12)  # of more than W of each level, none can be on a best path
        tokens = head.target_tokens(best.indices).tolist()
        ranked.append(list(zip(tokens, best.values.tolist(), strict=True)))
        paths = product(*ranked)
        levels.append({tuple(t for t, _ in path): sum(p for _, p in path) for path in paths})
    return levels


def paths_of(found: ExploredNodes, request: int) -> list[dict[tuple[int, ...], float]]:
    """The same of what a search found."""
    levels: list[dict[tuple[int, ...], float]] = []
    above: list[tuple[int, ...]] = [()]
    parts = (found.tokens, found.back_pointers, found.log_probs)
    for level in zip(*(part[request].tolist() for part in parts), strict=True):
        paths = [(*above[parent], token) for token, parent, _ in zip(*level, strict=True)]
        levels.append(dict(zip(paths, level[2], strict=True)))
        above = paths
    return levels


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_beams_are_the_most_probable_paths_of_the_cartesian_tree(sizes: dict[str, Any]) -> None:
    head = medusa(**sizes)
    embed, hidden, roots = inputs()
    width = 6
    found = beam_search(head, embed, hidden, roots, width, HEADS)
    for request in range(len(roots)):
        everything = cartesian_paths(head, hidden[request])
        for level, of_level in zip(paths_of(found, request), everything, strict=True):
            best = sorted(of_level, key=of_level.__getitem__, reverse=True)[:width]
            assert list(level) == best
            assert list(level.values()) == pytest.approx(
                [of_level[path] for path in best], abs=1e-4
            )


def assert_same(found: ExploredNodes, expected: ExploredNodes) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.back_pointers, expected.back_pointers)
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_cpu_engine_s_search_finds_the_same(sizes: dict[str, Any]) -> None:
    head, width = medusa(**sizes), 4
    arguments = inputs(requests=3)
    expected = beam_search(head, *arguments, width, HEADS)
    for form in (head, packed_form(head, packed)):
        assert_same(search(form, *arguments, SearchShape(width, HEADS)), expected)


def knowing() -> MedusaHead:
    """Heads that know the cycle language: the place of h in the word tells all that follows."""
    target = CycleTarget()
    head = MedusaHead(MedusaConfig(VOCAB_SIZE, HIDDEN_SIZE, num_heads=HEADS))
    for number, layer in enumerate(head.vocabulary_layers):
        # h is where the token before the root stands; the root is one further, the draft two.
        following = nn.functional.one_hot(torch.tensor(WORD).roll(-2 - number), VOCAB_SIZE)
        layer.weight.data = 30 * following.float().T @ target.place_codes
    return head.eval().requires_grad_(False)


def test_heads_that_know_the_language_are_always_right() -> None:
    """And so no head is one token too early or too late."""
    text, shape = rows(), ReDrafterConfig(HEADS, 1, HEADS, context_matches=0)
    config = EvaluationConfig()
    [found] = evaluate_shapes(knowing(), CycleTarget(), text, [shape], config)
    by_depth = found.acceptance.by_depth
    # All that is missed is cut off by the ends of the answers.
    assert by_depth[0] > found.acceptance.steps - len(text)
    assert found.acceptance.tokens_per_step > HEADS
    assert (top_accuracy(knowing(), CycleTarget(), text, HEADS) == 1).all()


def test_drafts_longer_than_there_are_heads_are_neither_trained_nor_evaluated() -> None:
    with pytest.raises(ConfigError, match=r"training: .* 4 exceeds the 3 tokens"):
        Distillation(knowing(), None, num_steps=4, target_share=0.0)
    with pytest.raises(ConfigError, match=r"evaluation: beam_length 4 exceeds the 3 tokens"):
        shape = ReDrafterConfig(8, 4, 4)
        evaluate_shapes(knowing(), CycleTarget(), rows(), [shape], EvaluationConfig())


# Serving


def test_vllm_s_checkpoints_stay_vllm_s_unless_trees_are_asked_for(tmp_path: Path) -> None:
    source = str(write(tmp_path / "source", VLLM, "model.safetensors", medusa().state_dict()))
    assert not is_head("medusa")
    assert request_for({"model": source, "num_speculative_tokens": 3}) is None
    assert request_for({"model": source, "method": "medusa"}) is None
    asked = {"model": source, "num_speculative_tokens": 8, "method": "redrafter"}
    for requested in (asked, {k: v for k, v in asked.items() if k != "method"} | {"beam_width": 4}):
        request = request_for(requested)
        assert request is not None
        _, checkpoint = validated(request)
        assert checkpoint is not None and checkpoint.head == medusa().config


def test_a_search_is_no_longer_than_there_are_heads(tmp_path: Path) -> None:
    folder = str(make_medusa(tmp_path, V, H, num_heads=HEADS))
    asked = {"model": folder, "num_speculative_tokens": 8}
    request = request_for(asked)
    assert request is not None and request.checkpoint is not None
    config, _ = validated(request)
    assert (config.beam_length, request.checkpoint.head.max_beam_length) == (HEADS, HEADS)
    with pytest.raises(
        ConfigError, match=r"beam_length 4 exceeds the 3 tokens .* ask for 3 or less"
    ):
        validated(Request({**asked, "beam_length": 4}))
    assert validated(Request({**asked, "beam_length": 2}))[0] == ReDrafterConfig(8, 4, 2)
