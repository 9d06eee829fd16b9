"""Greedy output equals plain Model Runner V2's on another kind of target, and with other settings.

A Qwen-style target: biases in q, k and v, and norms of q and k. The drafter is a real one with a
reduced vocabulary, the tree the paper's, K changes with the batch size, and scheduling is
synchronous.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
import workloads
from interpreted_engine import interpreted_engine
from vllm import SamplingParams

from vllm_redrafter import Drafter, DrafterConfig, save_drafter

pytestmark = pytest.mark.engine

VOCAB = 24
CONFIG = transformers.Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=512,
    initializer_range=0.3,
    attention_bias=True,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
)


def random_biases(model: torch.nn.Module) -> None:
    """Initialised, they are zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)


def reduced_drafter() -> Drafter:
    """It drafts 20 of the 24 tokens."""
    drafter = Drafter(DrafterConfig(VOCAB, 64, 64, draft_vocab_size=20))
    drafter.keep_tokens(torch.arange(3, 23))
    return drafter


def test_greedy_output_equals_plain_on_a_qwen_style_target(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG).float()
    random_biases(model)
    model.save_pretrained(tmp_path / "target")
    drafter = tmp_path / "drafter"
    save_drafter(reduced_drafter(), drafter)
    rng = random.Random(0)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(3, 70))] for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    load = workloads.Workload(prompts, [params] * len(prompts))
    speculative = {
        "model": str(drafter),
        "num_speculative_tokens": 10,
        "beam_width": 4,
        "beam_length": 3,
        "tree": "beams",
        # Another K as the batch shrinks: trees are cut to their first nodes.
        "num_speculative_tokens_per_batch_size": [[1, 3, 10], [4, 8, 5]],
    }
    arguments = {"skip_tokenizer_init": True, "max_num_batched_tokens": 96}
    with interpreted_engine(tmp_path / "target", **arguments) as plain:
        expected = [list(a.outputs[0].token_ids) for a in plain.run(load)]
    with interpreted_engine(
        tmp_path / "target", speculative_config=speculative, **arguments
    ) as llm:
        answers = [list(a.outputs[0].token_ids) for a in llm.run(load)]
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
    assert answers == expected
    assert accepted > 10, "trees were hardly used"
