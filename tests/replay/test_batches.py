# SPDX-License-Identifier: Apache-2.0
"""Rows and batches: what counts, and where rows begin."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from redrafter_testing.models.training_data import answered
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.target import load_target
from vllm_redrafter.utils.errors import ConfigError


def test_rows_follow_each_other_and_count_positions_anew() -> None:
    blocks = [[answered([5, 6], [8]), answered([7], [9])], [answered([7], [9, 3, 4])]]
    batch = TextBatch.of(blocks, min_length=6)
    assert batch.tokens.tolist() == [[5, 6, 8, 7, 9, 0], [7, 9, 3, 4, 0, 0]]
    assert batch.generated.int().tolist() == [[0, 0, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load it as a causal language model"):
        load_target(Target.open(tmp_path))
