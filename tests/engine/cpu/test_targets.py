"""Greedy output equals plain vLLM's on targets of other kinds than Llama."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm import SamplingParams

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.models.tiny_models import make_drafter, make_random_target
from redrafter_testing.requests import workloads
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

VOCAB = 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

TARGETS = {
    "Qwen3: norms of q and k": transformers.Qwen3Config(**SIZES),
    "Mistral: sliding window": transformers.MistralConfig(**SIZES, sliding_window=24),
    "Gemma 2: soft cap, every other layer with a sliding window": transformers.Gemma2Config(
        **SIZES, sliding_window=32, query_pre_attn_scalar=32
    ),
}


@pytest.mark.parametrize("config", TARGETS.values(), ids=TARGETS.keys())
def test_greedy_output_equals_plain(config: Any, tmp_path: Path) -> None:
    target = make_random_target(config, tmp_path / "target")
    # vLLM's Gemma 2 does not hand out its layers' hidden states.
    layers = () if config.model_type == "gemma2" else (1, 2, 3)
    drafter = make_drafter(tmp_path / "drafter", vocab_size=VOCAB, target_layers=layers)
    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(3, 90))] for _ in range(16)]
    params = SamplingParams(temperature=0, max_tokens=72, ignore_eos=True, detokenize=False)
    load = workloads.Workload(prompts, [params] * len(prompts))
    speculative = {
        "model": str(drafter),
        "num_speculative_tokens": 14,
        "adaptive": False,
        "beam_width": 5,
        "beam_length": 4,
        # Another K as the batch shrinks: trees are cut to their first nodes.
        "num_speculative_tokens_per_batch_size": [[1, 6, 14], [7, 16, 5]],
    }
    arguments = {"skip_tokenizer_init": True, "max_num_batched_tokens": 192}
    with cpu_engine(target, **arguments) as plain:
        expected = single_tokens_of(plain.run(load))
    with cpu_engine(target, speculative_config=speculative, **arguments) as llm:
        answers = single_tokens_of(llm.run(load))
        stats = llm.rpc("redrafter_stats")[0]
    assert answers == expected
    assert stats["sampled_tokens"] > stats["verifications"] + 40, "trees were hardly used"
