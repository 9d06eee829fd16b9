# SPDX-License-Identifier: Apache-2.0
"""Where a conversion writes to: all of it or nothing, and nothing of anybody's is overwritten."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.models.checkpoints import PROJECTED
from vllm_redrafter.checkpoints import writing
from vllm_redrafter.checkpoints.conversion import convert
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.utils.errors import ConfigError


def test_an_empty_folder_is_taken(source: Path, destination: Path) -> None:
    destination.mkdir()
    convert(str(source), destination)
    assert Checkpoint.open(str(destination)).head == PROJECTED


def test_a_link_to_an_empty_folder_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(str(source), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Checkpoint.open(str(tmp_path / "real")).head == PROJECTED


def test_other_content_is_left_alone(source: Path, destination: Path) -> None:
    destination.mkdir()
    (destination / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty: give another destination, or delete it"):
        convert(str(source), destination)
    assert [path.name for path in destination.iterdir()] == ["notes.txt"]


def test_a_file_is_left_alone(source: Path, destination: Path) -> None:
    destination.write_text("mine")
    with pytest.raises(ConfigError, match="is a file: give another destination"):
        convert(str(source), destination)
    assert destination.read_text() == "mine"


def test_a_checkpoint_is_not_converted_onto_itself(source: Path) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ConfigError, match="is not empty"):
        convert(str(source), source)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_a_folder_is_made_with_those_above_it(source: Path, tmp_path: Path) -> None:
    convert(str(source), tmp_path / "some" / "new" / "folder")
    assert [path.name for path in (tmp_path / "some/new").iterdir()] == ["folder"]
    # As any folder that the user makes, not as a temporary one.
    made = tmp_path / "some"
    assert (made / "new/folder").stat().st_mode == made.stat().st_mode


@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_nothing_behind(
    source: Path, destination: Path, existed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existed:
        destination.mkdir()
    (source / "README.md").write_text("the last file to be written")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(ConfigError, match=r"could not be written: .*No space left on device; make"):
        convert(str(source), destination)
    left = [path.name for path in source.parent.iterdir()]
    assert sorted(left) == (["destination", "source"] if existed else ["source"])
    assert not existed or not any(destination.iterdir())


def test_a_destination_that_was_filled_meanwhile_is_left_alone(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "README.md").write_text("the last file to be written")
    real = shutil.copyfile

    def copy(*args: Any) -> None:
        real(*args)
        destination.mkdir()
        (destination / "model.safetensors").write_text("another's")

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(ConfigError, match="could not be written"):
        convert(str(source), destination)
    assert [path.read_text() for path in destination.iterdir()] == ["another's"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["destination", "source"]


def test_an_interruption_leaves_nothing_behind(
    source: Path, destination: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), destination)
    assert [path.name for path in source.parent.iterdir()] == ["source"]
