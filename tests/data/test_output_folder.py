# SPDX-License-Identifier: Apache-2.0
"""Folders of shards: described once, continued by the same, a part written by one process."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_redrafter.data.dataset import DatasetInfo, write_shard
from vllm_redrafter.data.output_folder import Part
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.utils.errors import ConfigError

INFO = DatasetInfo("here", "a", "b", None, "c", 4, 2, 10)


def test_each_shard_belongs_to_one_part() -> None:
    parts = [Part.parse(f"{k}/5").shards(7) for k in range(1, 6)]
    assert sorted(shard for part in parts for shard in part) == list(range(7))
    assert Part.parse("1/1").shards(7) == range(7)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/2/3", "-1/2", "a/b", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"part must be k/n .* such as 2/8; got '{text}'"):
        Part.parse(text)


def missing(folder: Path, info: DatasetInfo = INFO, part: str = "1/1") -> list[int]:
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
    for info in (INFO, replace(INFO, target="the same files elsewhere")):
        assert missing(tmp_path, info) == [0, 1]
        assert DatasetInfo.load(tmp_path) == INFO
    other = replace(INFO, shard_size=3, sampling=SamplingSettings(top_k=5))
    with pytest.raises(
        ConfigError, match=r"cannot .* with these: shard_size: 2, not 3; top_k: None, not 5\. Give"
    ):
        missing(tmp_path, other)


def test_a_complete_folder_is_only_read(tmp_path: Path) -> None:
    INFO.save(tmp_path)
    for shard in range(2):
        write_shard(tmp_path, shard, [])
    before = sorted(tmp_path.iterdir())
    assert missing(tmp_path) == [] and sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConfigError, match=r"--output .*parquet/folder: cannot be written to"):
        missing(before[-1] / "folder")
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"holds shards without a dataset\.json"):
        missing(tmp_path)
