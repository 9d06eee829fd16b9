# SPDX-License-Identifier: Apache-2.0
"""The files of hidden states: what is written is read, and damage is said."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets

from vllm_redrafter.data.dataset import COLUMNS
from vllm_redrafter.data.hidden_states import (
    StatesInfo,
    StoredStates,
    text_fingerprint,
    write_states,
)
from vllm_redrafter.data.rows import Row
from vllm_redrafter.utils.errors import ConfigError

LENGTHS = np.array([5, 1, 9, 3])
INFO = StatesInfo("t", "f", "x", 4, 17, 8, 4, "bfloat16", 6)


SHARDS = [range(2), range(2, 3), range(3, 4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    INFO.save(tmp_path)
    for shard, rows in enumerate(SHARDS):
        write_states(tmp_path, shard, {row: states_of(row) for row in rows})
    return tmp_path


def states_of(row: int) -> torch.Tensor:
    length = min(int(LENGTHS[row]), INFO.max_length) - 1
    return torch.full((length, 4), row + 0.5, dtype=torch.bfloat16)


def test_rows_come_back_as_they_were_written(folder: Path) -> None:
    stored = StoredStates(folder, LENGTHS)
    assert stored.info == INFO and len(stored) == 4
    for row in (3, 0, 1, 2):
        assert torch.equal(stored[row], states_of(row))
    written = sum(states_of(row).nbytes for row in range(4))
    assert (INFO.num_tokens - INFO.num_rows) * INFO.bytes_per_token == written


def test_a_damaged_shard_is_named_when_it_is_read(folder: Path) -> None:
    path, stored = folder / "states-00002.safetensors", StoredStates(folder, LENGTHS)
    for content in (path.read_bytes()[:-2], b"", b"\xff" * 200):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"row 3 is not to be read .* delete it and start"):
            stored[3]
    for other, found in (
        (states_of(3)[:1], r"\[1, 4\] torch.bfloat16"),
        (states_of(3).float(), r"\[2, 4\] torch.float32"),
    ):
        write_states(folder, 2, {3: other})
        with pytest.raises(ConfigError, match=rf"row 3 is {found} where states.json"):
            stored[3]
    (folder / "states-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of 3 shards are missing, states-00001.safetensors"):
        StoredStates(folder, LENGTHS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format version 2, this version of vllm-redrafter reads 1"),
        ({"dtype": "nn"}, "not what capture writes: dtype is 'nn'"),
        ({"hidden_size": -4}, "not what capture writes: hidden_size must be .* got -4"),
        ({"more": 1}, "not what capture writes: .*more"),
    ],
)
def test_a_description_that_cannot_be_is_refused(
    change: dict[str, Any], message: str, folder: Path
) -> None:
    path = folder / "states.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        StoredStates(folder, LENGTHS)


def dataset(rows: list[list[int]]) -> Dataset:
    values = [asdict(Row(index, row, [True] * len(row))) for index, row in enumerate(rows)]
    return Dataset.from_list(values, features=COLUMNS)


def test_a_fingerprint_is_of_the_rows_and_not_of_how_they_lie() -> None:
    rows = [[1, 2, 3], [4], [5, 6]]
    whole = text_fingerprint(dataset(rows))
    assert len(whole) == 16
    assert text_fingerprint(concatenate_datasets([dataset(rows[:1]), dataset(rows[1:])])) == whole
    for other in ([[1, 2], [3, 4], [5, 6]], [[4], [1, 2, 3], [5, 6]], rows[:2], [[1, 2, 4], *rows]):
        assert text_fingerprint(dataset(other)) != whole
