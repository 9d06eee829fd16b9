# SPDX-License-Identifier: Apache-2.0
"""With an fp8 KV cache, greedy output equals that of vLLM's Triton attention with the same cache.

The checkpoint brings scales for K and V, as llm-compressor writes them.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.interpreted_engine import interpreted_engine, use_triton_attention
from redrafter_testing.models.tiny_models import make_drafter, make_small_target
from redrafter_testing.requests import workloads
from redrafter_testing.requests.answers import tokens_of

pytestmark = pytest.mark.engine

VOCAB = 24  # so few that a random drafter is often right
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
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        },
    }
    (target / "config.json").write_text(json.dumps(config))


def test_greedy_output_equals_plain(tmp_path: Path) -> None:
    target = make_small_target(tmp_path / "target", vocab_size=VOCAB)
    drafter = make_drafter(tmp_path / "drafter", vocab_size=VOCAB, hidden_size=64)
    prompts = [[2 + (5 * i + t * t) % (VOCAB - 2) for t in range(5 + 9 * i)] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    load = workloads.Workload(prompts, [params] * len(prompts))
    arguments = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96}
    add_scales(target)
    with interpreted_engine(target, setup=use_triton_attention, **arguments) as plain:
        expected = tokens_of(plain.run(load))
        assert plain.rpc(inside_worker.kv_caches) == [[("fp8", *scales) for scales in SCALES]]
    speculative = {"model": str(drafter), "num_speculative_tokens": 10}
    with interpreted_engine(target, speculative_config=speculative, **arguments) as llm:
        answers = tokens_of(llm.run(load))
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
        assert llm.rpc(inside_worker.kv_caches) == [[("fp8", *scales) for scales in SCALES]]
    assert answers == expected
    assert accepted > 10, "trees were hardly used"
