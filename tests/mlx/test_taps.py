# SPDX-License-Identifier: Apache-2.0
"""Hidden states are numbered as in transformers, which drafters are trained with."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from redrafter_testing.models.mlx_models import tiny_model
from vllm_redrafter.mlx.taps import take_positions
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.mlx.tree_cache import TreeInput

TOKENS = [17, 3, 88, 54, 9, 120, 42, 61]
SIZES: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen3Config(**SIZES), Gemma2Config(**SIZES, query_pre_attn_scalar=8)],
    ids=lambda config: config.model_type,
)
def test_hidden_states_are_those_of_transformers(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    reference.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path)
    layers = (1, 2, 4)
    target = TreeTarget(model, layers)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS]), output_hidden_states=True)
    last = reference.base_model.config.num_hidden_layers
    states = [expected.hidden_states[i][0].numpy() for i in (last, *layers)]
    logits, hidden = target.forward(mx.array(TOKENS), target.make_cache())
    assert (target.hidden_size, target.vocab_size, target.dtype) == (32, 128, mx.float32)
    np.testing.assert_allclose(hidden, np.concatenate(states, axis=1), rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(logits, expected.logits[0].numpy(), rtol=1e-3, atol=2e-5)
    embedded = expected.hidden_states[0][0].numpy()
    np.testing.assert_allclose(target.embed(mx.array(TOKENS)), embedded, rtol=1e-5)


def test_nodes_have_the_hidden_states_of_their_paths() -> None:
    target = TreeTarget(tiny_model("qwen3"), (1, 3))
    context, nodes = mx.array(TOKENS), mx.array([5, 6, 7, 8])
    caches = target.make_cache()
    target.forward(context, caches)
    _, hidden = target.forward(nodes, caches, TreeInput([0, 0, 0, 1]))
    path = mx.concatenate([context, nodes[mx.array([0, 1, 3])]])
    _, expected = target.forward(path, target.make_cache())
    assert mx.allclose(hidden[mx.array([0, 1, 3])], expected[-3:], atol=1e-5)


def test_a_rope_takes_a_position_for_each_token_and_other_offsets_as_before() -> None:
    plain, rope = nn.RoPE(8), nn.RoPE(8)
    take_positions(nn.Sequential(rope))
    x = mx.random.normal((1, 2, 3, 8))
    for heads in 1, 2:
        turned = rope(x[:, :heads], mx.array([9, 10, 10]))
        for token, position in enumerate([9, 10, 10]):
            alone = plain(x[:, :heads, token : token + 1], offset=position)
            assert mx.allclose(turned[:, :, token : token + 1], alone, atol=1e-6)
    batch = mx.random.normal((3, 2, 5, 8))
    for offset in 0, 4, mx.array(4), mx.array([1, 5, 7]):
        assert mx.array_equal(rope(batch, offset), plain(batch, offset=offset))
