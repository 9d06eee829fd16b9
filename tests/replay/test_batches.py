# SPDX-License-Identifier: Apache-2.0
"""Rows and batches: what counts, and where rows begin."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from redrafter_testing.models.cycle_language import rows
from redrafter_testing.models.training_data import answered
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.target import load_target
from vllm_redrafter.utils.errors import ConfigError


def test_prompts_and_padding_are_not_generated() -> None:
    batch = TextBatch.of([[answered([5, 6], [8])], [answered([7], [9, 3, 4])]])
    assert batch.tokens.tolist() == [[5, 6, 8, 0], [7, 9, 3, 4]]
    assert batch.generated.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]


def test_packed_rows_follow_each_other_and_count_positions_anew() -> None:
    batch = TextBatch.of([[answered([5, 6], [8]), answered([7], [9])]])
    assert batch.tokens.tolist() == [[5, 6, 8, 7, 9]]
    assert batch.generated.int().tolist() == [[0, 0, 1, 0, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]


def test_a_batch_is_as_long_as_is_asked_for() -> None:
    batch = TextBatch.of([[answered([5], [8])]], min_length=4)
    assert batch.tokens.tolist() == [[5, 8, 0, 0]]
    assert batch.generated.int().tolist() == [[0, 1, 0, 0]]


def test_rows_in_memory_know_their_lengths() -> None:
    assert rows(num=3, length=7).lengths.tolist() == [7, 7, 7]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load it as a causal language model"):
        load_target(Target.open(tmp_path))
