"""The target's answers, and which of them are worth measuring."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_redrafter.demo import answers
from vllm_redrafter.demo.answers import repeated_share, write_answers

EOS = 7


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def test_answers_are_those_of_one_prompt_at_a_time(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "CLEAR_EVERY", 2)
    prompts = [[1 + (i * j) % 6 for j in range(2 + i % 5)] for i in range(13)]
    written = write_answers(target, prompts, EOS, 12, 8, Console(file=io.StringIO()))
    for prompt, answer in zip(prompts, written, strict=True):
        output = target.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=EOS
        )
        assert answer == output[0, len(prompt) :].tolist()
    lengths = {len(answer) for answer in written}
    assert 12 in lengths and len(lengths) > 2, "some answers must end early, at different steps"


def test_repeated_share_counts_later_occurrences() -> None:
    assert repeated_share([[1, 2, 3, 4]], length=2) == 0.0
    # 1 2, 2 1, 1 2, 2 1: two of four were there before.
    assert repeated_share([[1, 2, 1, 2, 1]], length=2) == 0.5
    # Answers are looked at one by one, and those too short do not count.
    assert repeated_share([[1, 2, 3], [1, 2, 3], [1]], length=3) == 0.0
    assert repeated_share([]) == 0.0
