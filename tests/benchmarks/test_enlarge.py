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

from redrafter_testing.models.head_forms import write_random
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.heads.speculators import LstmSpeculatorConfig, MlpSpeculatorConfig

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
SIZES, SELECTOR = (SMALL["vocab_size"], SMALL["hidden_size"]), SelectorConfig(2, 5)
DRAFTERS = {
    "gated": GatedConfig(*SIZES, num_draft_layers=1, selector=SELECTOR),
    "mlp": MlpSpeculatorConfig(*SIZES, width=24, num_levels=3, scale_input=True),
    "lstm": LstmSpeculatorConfig(*SIZES, width=40, num_levels=3, selector=SELECTOR),
    "untied": MlpSpeculatorConfig(*SIZES, width=24, num_levels=3, tied=False),
}


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
    for name, sizes in DRAFTERS.items():
        write_random(sizes, folder / name)
    return folder


@pytest.fixture(scope="module")
def large(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    found = targets.enlarge_target(small / "target", folder / "target", LARGE, torch.float32)
    for name in DRAFTERS:
        drafters.enlarge_drafter(small / name, folder / name, found, RANKED, torch.float32)
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


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_the_large_drafter_has_the_logits_of_the_small_one(
    name: str, small: Path, large: Path
) -> None:
    tokens = torch.randint(SMALL["vocab_size"], (3, 20), generator=torch.manual_seed(SEED))
    found = []
    for folder in (small, large):
        hidden, _ = hidden_and_logits(folder, tokens)
        model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
        head = load_drafter(str(folder / name))
        of_target = model.get_input_embeddings()
        condition = head.condition(hidden)
        state = head.start(condition, head.embedding_of(of_target, 0)(tokens))
        logits = [head.logits(condition, state, 0)]
        if head.selector is not None:
            logits.append(head.vocabulary_layer(head.base_features(condition, state, 3)))
        for depth in (1, 2):
            embedded = head.embedding_of(of_target, depth)(tokens)
            state = head.advance(state, embedded, depth)
            logits.append(head.logits(condition, state, depth))
        found.append(logits)
    for expected, logits_of_large in zip(*found, strict=True):
        assert logits_of_large.shape[-1] == RANKED
        torch.testing.assert_close(logits_of_large[..., :50], expected, rtol=1e-3, atol=1e-3)
        assert logits_of_large[..., 50:].max() < expected.min() - 30
