# SPDX-License-Identifier: Apache-2.0
"""benchmarks/enlarge.py: a pair of larger sizes, whose logits are the small pair's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from enlarge_parts import drafter as drafters
from enlarge_parts import target as targets
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from vllm_redrafter import new_head, save_drafter
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.heads.selector import SelectorConfig

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LARGE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
RANKED = 70
SEED = 0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(SEED)
    config = LlamaConfig(
        **SMALL, initializer_range=0.3, rms_norm_eps=1e-3, max_position_embeddings=64
    )
    target = LlamaForCausalLM(config)
    for name, weight in target.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    target.save_pretrained(folder / "target")
    sizes: dict[str, Any] = {"num_draft_layers": 1, "selector": SelectorConfig(2, 5)}
    head = new_head("gated", SMALL["vocab_size"], SMALL["hidden_size"], **sizes)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    save_drafter(head, folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def large(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    found = targets.enlarge_target(small / "target", folder / "target", LARGE, torch.float32)
    drafters.enlarge_drafter(small / "drafter", folder / "drafter", found, RANKED, torch.float32)
    return folder


def hidden_and_logits(folder: Path, tokens: Tensor) -> tuple[Tensor, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    found = model(tokens, output_hidden_states=True)
    return found.hidden_states[-1], found.logits


@torch.no_grad()
def test_the_large_target_has_the_logits_of_the_small_one(small: Path, large: Path) -> None:
    tokens = torch.randint(SMALL["vocab_size"], (3, 20), generator=torch.manual_seed(SEED))
    _, expected = hidden_and_logits(small, tokens)
    _, logits = hidden_and_logits(large, tokens)
    assert logits.shape[-1] == LARGE["vocab_size"]
    torch.testing.assert_close(logits[..., :50], expected, rtol=1e-3, atol=1e-3)
    assert expected.std() > 1
    assert logits[..., 50:].max() < expected.min() - 30


@torch.no_grad()
def test_the_large_drafter_has_the_logits_of_the_small_one(small: Path, large: Path) -> None:
    tokens = torch.randint(SMALL["vocab_size"], (3, 20), generator=torch.manual_seed(SEED))
    found = []
    for folder in (small, large):
        hidden, _ = hidden_and_logits(folder, tokens)
        model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
        head = load_drafter(str(folder / "drafter"))
        embed = model.get_input_embeddings()
        condition = head.condition(hidden)
        state = head.start(condition, embed(tokens))
        first = head.logits(condition, state, 0)
        second = head.logits(condition, head.advance(state, embed(tokens), 1), 1)
        selected = head.vocabulary_layer(head.base_features(condition, state, 3))
        found.append((first, second, selected))
    for expected, logits in zip(*found, strict=True):
        assert logits.shape[-1] == RANKED
        torch.testing.assert_close(logits[..., :50], expected, rtol=1e-3, atol=1e-3)
        assert logits[..., 50:].max() < expected.min() - 30
