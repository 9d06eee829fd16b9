"""Greedy output equals plain Model Runner V2's on other kinds of targets, and with other settings.

The drafter is a real one, K changes with the batch size, and scheduling is synchronous.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm import SamplingParams

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.models.tiny_models import make_random_target
from redrafter_testing.requests import workloads
from redrafter_testing.requests.answers import tokens_of
from vllm_redrafter import save_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

pytestmark = pytest.mark.engine

VOCAB = 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

TARGETS = {
    "Qwen-style: biases, norms of q and k, a reduced draft vocabulary": (
        transformers.Qwen3Config(**SIZES, attention_bias=True),
        RecurrentConfig(VOCAB, 64, 64, draft_vocab_size=20),
        "beams",
    ),
    "Mistral: sliding window, heads of 128, tied embeddings": (
        transformers.MistralConfig(
            **{**SIZES, "head_dim": 128}, sliding_window=24, tie_word_embeddings=True
        ),
        RecurrentConfig(VOCAB, 64, 64),
        "beams",
    ),
    "Gemma 2: soft caps, a sliding window in every other layer": (
        transformers.Gemma2Config(
            **SIZES, sliding_window=32, query_pre_attn_scalar=64, attn_logit_softcapping=5.0
        ),
        RecurrentConfig(VOCAB, 64, 64),
        "explored",
    ),
    "Granite: attention sinks, a sliding window in every other layer": (
        transformers.GraniteConfig(
            **SIZES,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
            attention_sinks=True,
            attention_multiplier=0.125,
        ),
        RecurrentConfig(VOCAB, 64, 64),
        "explored",
    ),
}


def random_drafter(config: RecurrentConfig) -> RecurrentHead:
    """With a reduced vocabulary it drafts 20 of the 24 tokens."""
    drafter = RecurrentHead(config)
    if config.draft_vocab_size is not None:
        drafter.keep_tokens(torch.arange(3, 23))
    return drafter


@pytest.mark.parametrize(("config", "draft_config", "tree"), TARGETS.values(), ids=TARGETS.keys())
def test_greedy_output_equals_plain(
    config: Any, draft_config: RecurrentConfig, tree: str, tmp_path: Path
) -> None:
    target = make_random_target(config, tmp_path / "target")
    drafter = tmp_path / "drafter"
    save_drafter(random_drafter(draft_config), drafter)
    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(3, 70))] for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    load = workloads.Workload(prompts, [params] * len(prompts))
    speculative = {
        "model": str(drafter),
        "num_speculative_tokens": 10,
        "beam_width": 6,
        "beam_length": 3,
        "tree": tree,
        # Another K as the batch shrinks: trees are cut to their first nodes.
        "num_speculative_tokens_per_batch_size": [[1, 3, 10], [4, 8, 6]],
    }
    arguments = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96}
    with interpreted_engine(target, **arguments) as plain:
        expected = tokens_of(plain.run(load))
    with interpreted_engine(target, speculative_config=speculative, **arguments) as llm:
        answers = tokens_of(llm.run(load))
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
        (groups,) = llm.rpc(inside_worker.kv_cache_groups)
    assert answers == expected
    assert accepted > 10, "trees were hardly used"
    assert groups == len(set(getattr(config, "layer_types", None) or ["one"]))
