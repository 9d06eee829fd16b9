# SPDX-License-Identifier: Apache-2.0
"""The training data's folder: whole shards or none, and only what belongs together."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from vllm_redrafter.data import dataset
from vllm_redrafter.data.dataset import (
    COLUMNS,
    DatasetInfo,
    first_broken_row,
    read_dataset,
    write_shard,
)
from vllm_redrafter.data.rows import Row
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.utils.errors import ConfigError

INFO = DatasetInfo("here", "a", "b", None, "c", 5, 2, 10, sampling=SamplingSettings(top_k=5))
ONE_SHARD = replace(INFO, num_conversations=2)
ROWS = [
    Row(0, [1, 2, 3], [False, True, True]),
    Row(1, [4, 5], [False, True]),
]


def columns(rows: list[Row], names: list[str]) -> dict[str, list[object]]:
    return {name: [getattr(row, name) for row in rows] for name in names}


def test_rows_survive_the_disk_and_missing_shards_and_leftovers_are_not_read(
    tmp_path: Path,
) -> None:
    INFO.save(tmp_path)
    (tmp_path / ".shard-00000.parquet.tmp").write_bytes(b"PAR1 half")
    (tmp_path / "shard-1.parquet").write_bytes(b"not ours")
    last = replace(ROWS[0], conversation=4)
    write_shard(tmp_path, 2, [last])
    missing = r"2 of 3 shards are missing, shard-00000\.parquet first: start generate-data again"
    with pytest.raises(ConfigError, match=missing):
        read_dataset(tmp_path)
    write_shard(tmp_path, 0, ROWS)
    write_shard(tmp_path, 1, [])
    info, data = read_dataset(tmp_path)
    assert info == INFO
    assert DatasetInfo.finished_shards(tmp_path) == [0, 1, 2]
    assert data[:] == columns([*ROWS, last], data.column_names)
    assert data.features["input_ids"].feature.dtype == "int32"


def test_a_full_disk_is_named_and_leaves_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"shard-00000\.parquet: cannot be writ.*continue"):
            write_shard(tmp_path, 0, ROWS)
        assert not list(tmp_path.iterdir())
    ONE_SHARD.save(tmp_path)
    write_shard(tmp_path, 0, ROWS)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "rows.arrow").symlink_to("/dev/full")
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path / "tmp"))
    with pytest.raises(ConfigError, match=r"tmp: cannot be written to .* TMPDIR$"):
        read_dataset(tmp_path)


def test_foreign_and_copied_shards_are_named(tmp_path: Path) -> None:
    ONE_SHARD.save(tmp_path)
    write_shard(tmp_path, 0, ROWS)
    path = tmp_path / "shard-00000.parquet"
    for copy, message in (
        ("shard-000000.parquet", r"shard-000000\.parquet and shard-00000\.parquet are two names"),
        ("shard-00007.parquet", r"shard-00007\.parquet: has conversation 0, which belongs into "),
    ):
        shutil.copy(path, tmp_path / copy)
        with pytest.raises(ConfigError, match=rf"{message}.*delete"):
            read_dataset(tmp_path)
        (tmp_path / copy).unlink()
    Dataset.from_dict({"text": ["a"]}).to_parquet(path)
    with pytest.raises(ConfigError, match=r"shard-00000\.parquet: has columns .*data; delete it"):
        read_dataset(tmp_path)


@pytest.mark.parametrize(
    "name", ["run[1]", "what?", "lr*", "a::b", "T=0.7 [v2]", "{a,b}", "a#b%20"]
)
def test_a_folder_is_read_by_its_name_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in ("run1", "whatx", "lr-2", "a", "b"):
        (tmp_path / other).mkdir()
        write_shard(tmp_path / other, 0, ROWS[:1])
    folder = tmp_path / name
    folder.mkdir()
    ONE_SHARD.save(folder)
    write_shard(folder, 0, ROWS)
    (tmp_path / "tmp of [1]?").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp of [1]?"))
    assert len(read_dataset(folder)[1]) == 2
    monkeypatch.chdir(tmp_path)
    assert len(read_dataset(name)[1]) == 2


def test_folders_without_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no dataset\.json there; give a folder that generate-d"):
        read_dataset(tmp_path)
    ONE_SHARD.save(tmp_path)
    write_shard(tmp_path, 0, [])
    with pytest.raises(ConfigError, match="its 1 shards have no row: every prompt was too long"):
        read_dataset(tmp_path)
    for content, message in (("[1]", "format version None"), ("{", "not readable as JSON")):
        (tmp_path / "dataset.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_dataset(tmp_path)


GOOD = Row(0, [1, 2, 9], [False, True, True])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": [1, -1, 9]}, "outside"),
        ({"input_ids": [1, 2, 10]}, "outside"),
        ({"input_ids": [1, None, 9]}, "outside"),
        ({"input_ids": None}, "differ in length"),
        ({"assistant_mask": [False, True]}, "differ in length"),
    ],
)
@pytest.mark.parametrize("place", [0, 4, 7])
def test_the_first_broken_row_is_named(
    change: dict[str, Any], reason: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "ROWS_AT_ONCE", 3)
    broken = replace(GOOD, **change)
    for first, rows in ((None, [GOOD] * 8), (place, [*[GOOD] * place, broken, GOOD, broken])):
        data = Dataset.from_dict(columns(rows, list(COLUMNS)), features=COLUMNS)
        found = first_broken_row(data, 10)
        assert found is None if first is None else found and found[0] == first
        assert found is None or reason in found[1]
