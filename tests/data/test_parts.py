# SPDX-License-Identifier: Apache-2.0
"""Parts: each shard belongs to one, and each part to one process at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_redrafter.data.parts import Part
from vllm_redrafter.utils.errors import ConfigError


@pytest.mark.parametrize("num", [1, 2, 5])
def test_each_shard_belongs_to_one_part(num: int) -> None:
    parts = [Part.parse(f"{k}/{num}", "test:") for k in range(1, num + 1)]
    assert [[part.has(shard) for part in parts].count(True) for shard in range(7)] == [1] * 7


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/2/3", "-1/2", "a/b", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"test: part must be k/n .* such as 2/8; got '{text}'"):
        Part.parse(text, "test:")


def test_a_part_is_written_by_one_process_until_it_ends(tmp_path: Path) -> None:
    part, folder = Part(1, 2), tmp_path / "made"
    hold = (
        "import sys; from pathlib import Path; from vllm_redrafter.data.parts import Part\n"
        "with Part(1, 2).locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            with (
                pytest.raises(ConfigError, match="another process is writing part 1/2; wait for"),
                part.locked(folder),
            ):
                pass
            with Part(2, 2).locked(folder):
                pass
            with (
                pytest.raises(ConfigError, match="writing part 1/2; give all the same number"),
                Part(1, 3).locked(folder),
            ):
                pass
        finally:
            holder.kill()
    for free in (part, Part(1, 3)):
        with free.locked(folder):
            pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"--output .*file/folder: cannot be written to"),
        Part(1, 1).locked(tmp_path / "file" / "folder"),
    ):
        pass
