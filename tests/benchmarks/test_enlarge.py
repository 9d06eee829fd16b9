# SPDX-License-Identifier: Apache-2.0
"""benchmarks/enlarge.py: a pair of larger sizes, whose logits are the small pair's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from enlarge import main
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


HEADS: dict[str, dict[str, Any]] = {
    "gated": {"num_draft_layers": 1},
    "selector": {"selector": SelectorConfig(2, 5)},
}


@pytest.fixture(scope="module", params=HEADS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    sizes = HEADS[request.param]
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
        first = head.logits(condition, state, 1)
        logits = [first, head.logits(condition, head.advance(state, embed(tokens)), 2)]
        if head.config.selected_depths:
            logits.append(head.vocabulary_layers[0](head.base_features(condition, state, 3)))
        found.append(logits)
    for expected, logits in zip(*found, strict=True):
        assert logits.shape[-1] == RANKED
        torch.testing.assert_close(logits[..., :50], expected, rtol=1e-3, atol=1e-3)
        assert logits[..., 50:].max() < expected.min() - 30


def test_all_weights_have_the_named_sizes(large: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(large / "target")
    assert model.config.num_hidden_layers == LARGE["num_hidden_layers"]
    mlp = model.model.layers[2].mlp
    assert mlp.up_proj.weight.shape == (LARGE["intermediate_size"], LARGE["hidden_size"])
    assert mlp.up_proj.weight.std() > 0.01
    assert not mlp.down_proj.weight.any()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 24}, "hidden_size and the constant: 33 exceeds the shape's 24"),
        ({"head_dim": 12}, "heads have 8 numbers, which does not divide 12"),
        ({"num_attention_heads": 4}, "query heads of a KV head: 2 exceeds the shape's 1"),
        ({"num_hidden_layers": 1}, "num_hidden_layers: 2 exceeds the shape's 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    sizes: dict[str, int], message: str, small: Path, tmp_path: Path
) -> None:
    with pytest.raises(targets.EnlargeError, match=message):
        targets.enlarge_target(small / "target", tmp_path / "x", LARGE | sizes, torch.float32)


def test_another_head_is_refused(small: Path, tmp_path: Path) -> None:
    save_drafter(new_head("recurrent", 50, 32), tmp_path / "recurrent")
    sizes = LlamaConfig(**SMALL), LlamaConfig(**LARGE)
    with pytest.raises(targets.EnlargeError, match="expected a gated one"):
        drafters.enlarge_drafter(
            tmp_path / "recurrent", tmp_path / "x", sizes, RANKED, torch.float32
        )
    with pytest.raises(targets.EnlargeError, match="--draft-vocab-size 49: the drafter ranks 50"):
        drafters.enlarge_drafter(small / "drafter", tmp_path / "x", sizes, 49, torch.float32)


def test_a_folder_without_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "empty"), str(tmp_path / "d"), str(tmp_path / "new")])
    assert str(tmp_path / "empty") in capsys.readouterr().err
