# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads: their mathematics, and serving."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.naive import silu
from redrafter_testing.models.cycle_language import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    CycleTarget,
    rows,
)
from redrafter_testing.models.medusa_heads import HEADS, SIZES, VLLM, H, V, medusa, write
from redrafter_testing.models.tiny_models import make_medusa
from vllm_redrafter import ConfigError, ReDrafterConfig
from vllm_redrafter.engine.speculative_config import Request, request_for, validated
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.evaluation.evaluate import evaluate_shapes
from vllm_redrafter.heads.medusa import MedusaConfig, MedusaHead
from vllm_redrafter.heads.registry import heads
from vllm_redrafter.training.distillation import Distillation


def expected_logits(head: MedusaHead, hidden: Tensor, number: int) -> Tensor:
    """Of one head, by the paper's formula."""
    tensors, x = head.state_dict(), hidden
    for layer in range(head.config.num_draft_layers):
        name = f"blocks.{number}.layers.{layer}"
        x = x + silu(x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(())))
    shared = head.config.shared_output
    return x @ tensors["lm_head.weight" if shared else f"lm_heads.{number}.weight"].T


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_level_s_logits_are_its_head_s_whatever_was_drafted(sizes: dict[str, Any]) -> None:
    head = medusa(**sizes)
    hidden, embedded = torch.randn(2, 3, H)
    condition = head.condition(hidden)
    state = head.start(condition, embedded)
    for depth in range(HEADS):
        found = head.logits(condition, state, depth)
        torch.testing.assert_close(found, expected_logits(head, hidden, depth))
        state = head.advance(state, embedded + depth)


@pytest.mark.parametrize(
    "sizes",
    [
        *({"num_heads": wrong} for wrong in (0, True, 128)),
        *({"num_heads": 2, "num_draft_layers": wrong} for wrong in (-1, 257)),
        *({"num_heads": 2, "bias": 1}, {"num_heads": 2, "shared_output": "yes"}),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(sizes)[-1]):
        MedusaConfig(V, H, **sizes)


def test_drafts_longer_than_there_are_heads_are_neither_trained_nor_evaluated() -> None:
    head = MedusaHead(MedusaConfig(VOCAB_SIZE, HIDDEN_SIZE, num_heads=HEADS))
    with pytest.raises(ConfigError, match=r"training: .* 4 exceeds the 3 tokens"):
        Distillation(head, None, num_steps=4, target_share=0.0)
    with pytest.raises(ConfigError, match=r"evaluation: beam_length 4 exceeds the 3 tokens"):
        shape = ReDrafterConfig(8, 4, 4)
        evaluate_shapes(head, CycleTarget(), rows(), [shape], EvaluationConfig())


def test_vllm_s_checkpoints_stay_vllm_s_unless_trees_are_asked_for(tmp_path: Path) -> None:
    source = str(write(tmp_path / "source", VLLM, "model.safetensors", medusa().state_dict()))
    assert "medusa" not in heads()
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
