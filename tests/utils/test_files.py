# SPDX-License-Identifier: Apache-2.0
"""Files and folders are whole under their names, or what was there before is left."""

import errno
import os
from pathlib import Path

import pytest

from vllm_redrafter.utils.files import whole_file, whole_folder, write_once


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_of_several_writers_the_first_one_s_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(source: Path, name: Path) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for content in (b"first", b"second"):
        write_once(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == b"first" and names(tmp_path) == ["file"]


def test_a_folder_takes_its_name_when_it_is_whole_and_is_left_alone_then(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folder"
    with whole_folder(path) as folder:
        (folder / "file").write_text("content")
        assert not path.exists()
    with pytest.raises(OSError), whole_folder(path) as folder:
        (folder / "other").touch()
    assert names(path) == ["file"] and names(tmp_path / "some") == ["folder"]


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyboardInterrupt])
def test_a_file_is_replaced_when_it_is_whole_and_nothing_is_left_of_half_a_one(
    tmp_path: Path, error: type[BaseException]
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with whole_file(tmp_path / "file") as file:
        file.write(b"new")
        assert (tmp_path / "file").read_bytes() == b"old"
    with pytest.raises(error), whole_file(tmp_path / "file") as file:
        file.write(b"half")
        raise error
    with pytest.raises(error), whole_folder(tmp_path / "folder") as folder:
        (folder / "file").write_text("half")
        raise error
    assert names(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"new"
