# SPDX-License-Identifier: Apache-2.0
"""The training data's folder: whole shards or none, of one kind, each part by one process."""

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
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
from vllm_redrafter.data.output_folder import Part
from vllm_redrafter.data.rows import Row
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.utils.errors import ConfigError

INFO = DatasetInfo("here", "a", "b", None, "c", 5, 2, 10, sampling=SamplingSettings(top_k=5))
ONE_SHARD = replace(INFO, num_conversations=2)
ROWS = [Row(0, [1, 2, 3], [False, True, True]), Row(1, [4, 5], [False, True])]


def test_rows_survive_the_disk_and_missing_shards_and_leftovers_are_skipped(tmp_path: Path) -> None:
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
    assert data.to_list() == [asdict(row) for row in (*ROWS, last)]
    assert data.features["input_ids"].feature.dtype == "int32"


def test_a_full_disk_is_named_and_leaves_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"shard-00000\.parquet cannot be writ.*continue"):
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
    for content, message in (("[1]", "expected a JSON object"), ("{", "not readable as JSON")):
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
        data = Dataset.from_list([asdict(row) for row in rows], features=COLUMNS)
        found = first_broken_row(data, 10)
        assert found is None if first is None else found and found[0] == first
        assert found is None or reason in found[1]


FOUR = DatasetInfo("here", "a", "b", None, "c", 4, 2, 10)


def test_each_shard_belongs_to_one_part() -> None:
    parts = [Part.parse(f"{k}/5").shards(7) for k in range(1, 6)]
    assert sorted(shard for part in parts for shard in part) == list(range(7))
    assert Part.parse("1/1").shards(7) == range(7)
    for text in ("0/2", "3/2", "2", "1/2/3", "-1/2", "a/b", ""):
        with pytest.raises(ConfigError, match=rf"part must be k/n .* such as 2/8; got '{text}'"):
            Part.parse(text)


def missing(folder: Path, info: DatasetInfo = FOUR, part: str = "1/1") -> list[int]:
    with info.missing_shards(folder, Part.parse(part), info.num_shards) as shards:
        return shards


def test_a_part_is_written_by_one_process_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    hold = (
        "import sys; from pathlib import Path; from vllm_redrafter.data import dataset\n"
        "from vllm_redrafter.data.output_folder import Part\n"
        "info = dataset.DatasetInfo('here', 'a', 'b', None, 'c', 4, 2, 10)\n"
        "with info.missing_shards(Path(sys.argv[1]), Part(1, 2), 2):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            with pytest.raises(ConfigError, match="another process is writing part 1/2; wait for"):
                missing(folder, part="1/2")
            assert missing(folder, part="2/2") == [1]
            with pytest.raises(ConfigError, match="writing part 1/2; give all the same number"):
                missing(folder, part="1/3")
        finally:
            holder.kill()
    assert missing(folder, part="1/2") == missing(folder, part="1/3") == [0]


def test_a_folder_is_continued_by_what_it_was_begun_with(tmp_path: Path) -> None:
    for info in (FOUR, replace(FOUR, target="the same files elsewhere")):
        assert missing(tmp_path, info) == [0, 1]
        assert DatasetInfo.load(tmp_path) == FOUR
    other = replace(FOUR, shard_size=3, sampling=SamplingSettings(top_k=5))
    message = r"cannot .* with these: shard_size: 2, not 3; top_k: None, not 5\. Give"
    with pytest.raises(ConfigError, match=message):
        missing(tmp_path, other)


def test_a_complete_folder_is_only_read(tmp_path: Path) -> None:
    FOUR.save(tmp_path)
    for shard in range(2):
        write_shard(tmp_path, shard, [])
    before = sorted(tmp_path.iterdir())
    assert missing(tmp_path) == [] and sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConfigError, match=r"--output .*parquet/folder cannot be written: "):
        missing(before[-1] / "folder")
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"holds shards without a dataset\.json"):
        missing(tmp_path)
