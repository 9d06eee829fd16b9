"""A drafter fits a target of its own hidden and vocabulary size, and no other."""

from __future__ import annotations

from transformers import Gemma3Config, LlamaConfig, PretrainedConfig

from vllm_redrafter.checkpoints.fit import SizeDifference, differences_from, size_differences
from vllm_redrafter.heads.recurrent import RecurrentConfig

DRAFTER = RecurrentConfig(vocab_size=11, hidden_size=4, exit_dim=6)


def test_differing_sizes_are_named_with_both_values() -> None:
    hidden = SizeDifference("hidden_size", "hidden size", 4, 8)
    vocabulary = SizeDifference("vocab_size", "vocabulary size", 11, 12)
    assert size_differences(DRAFTER, 4, 11) == []
    assert size_differences(DRAFTER, 8, 11) == [hidden]
    assert size_differences(DRAFTER, 4, 12) == [vocabulary]
    assert size_differences(DRAFTER, 8, 12) == [hidden, vocabulary]


def test_a_multimodal_target_is_measured_by_its_text_model() -> None:
    text = {"vocab_size": 11, "hidden_size": 4, "num_attention_heads": 1}
    assert differences_from(DRAFTER, Gemma3Config(text_config=text)) == []
    config = LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2)
    assert [size.target for size in differences_from(DRAFTER, config)] == [8]


def test_a_size_that_a_target_does_not_state_differs() -> None:
    assert [size.target for size in differences_from(DRAFTER, PretrainedConfig())] == [None, None]
