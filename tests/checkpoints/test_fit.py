# SPDX-License-Identifier: Apache-2.0
"""A drafter fits a target of its own hidden and vocabulary size, and no other."""

import pytest
from transformers import Gemma3Config, LlamaConfig

from vllm_redrafter.checkpoints.fit import misfits, misfits_of, require_fit
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.utils.errors import ConfigError

DRAFTER = RecurrentConfig(vocab_size=11, hidden_size=4, exit_dim=6)


def test_differing_sizes_are_named_with_both_values() -> None:
    hidden = "the drafter's hidden size is 4, the target's 8"
    vocabulary = "the drafter's vocabulary size is 11, the target's 12"
    assert [*misfits(DRAFTER, 4, 11)] == []
    assert [*misfits(DRAFTER, 8, 11)] == [hidden]
    assert [*misfits(DRAFTER, 8, 12)] == [hidden, vocabulary]
    require_fit("mine", "theirs", [])
    with pytest.raises(ConfigError, match=f"mine does not fit the target 'theirs': {hidden}; the"):
        require_fit("mine", "theirs", [hidden, vocabulary])


def test_a_multimodal_target_is_measured_by_its_text_model() -> None:
    text = {"vocab_size": 11, "hidden_size": 4, "num_attention_heads": 1}
    assert misfits_of(DRAFTER, Gemma3Config(text_config=text)) == []
    config = LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2)
    assert len(misfits_of(DRAFTER, config)) == 1


def test_layers_that_the_target_lacks_are_named() -> None:
    config = LlamaConfig(vocab_size=11, hidden_size=4, num_attention_heads=2, num_hidden_layers=2)
    fused = RecurrentConfig(vocab_size=11, hidden_size=4, exit_dim=6, target_layers=(1, 2))
    [reason] = misfits_of(fused, config)
    assert "layers 1, 2 are asked for, and the target has 2" in reason
    assert misfits_of(fused, config, with_layers=False) == []
