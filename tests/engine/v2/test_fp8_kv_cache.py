# SPDX-License-Identifier: Apache-2.0
"""With an fp8 KV cache, greedy output equals that of vLLM's Triton attention with the same cache.

The checkpoint brings scales for K and V, as llm-compressor writes them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.interpreted_engine import interpreted_engine, use_triton_attention
from redrafter_testing.requests import few_tokens

pytestmark = pytest.mark.engine

SCALES = [(0.0625, 0.03125), (0.03125, 0.0625)]
"""Of K and V, by layer."""


def add_scales(target: Path) -> None:
    """Make the checkpoint one with a quantised KV cache, and nothing else quantised."""
    weights = load_file(target / "model.safetensors")
    for layer, scales in enumerate(SCALES):
        for name, scale in zip("kv", scales, strict=True):
            weights[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([scale])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {**scheme, "symmetric": True, "dynamic": False},
    }
    (target / "config.json").write_text(json.dumps(config))


def test_greedy_output_equals_plain(
    few_tokens_target: Path, few_tokens_drafter: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(few_tokens_target, tmp_path / "target")
    add_scales(target)
    load = few_tokens.requests("greedy", count=6)
    arguments = {"max_num_batched_tokens": 96}
    caches = [[("fp8", *scales) for scales in SCALES]]
    with interpreted_engine(target, setup=use_triton_attention, **arguments) as plain:
        expected = plain.tokens(load)
        assert plain.rpc(inside_worker.kv_caches) == caches
    speculative = {"model": str(few_tokens_drafter), "num_speculative_tokens": 10}
    arguments |= {"speculative_config": speculative, "attention_kernels": True}
    with interpreted_engine(target, **arguments) as llm:
        assert llm.tokens(load) == expected
        assert llm.accepted() > 10, "trees were hardly used"
        assert llm.rpc(inside_worker.kv_caches) == caches
