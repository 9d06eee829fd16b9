# SPDX-License-Identifier: Apache-2.0
"""A recorded shape is read again, all else stays; where there is no place for it, it is refused."""

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from redrafter_testing.models.checkpoints import PROJECTED, edit_config
from vllm_redrafter.checkpoints.acceptance import AcceptanceRecord, PerSampling, acceptance_of
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import shape_of
from vllm_redrafter.checkpoints.writing import check_recordable, save_drafter, save_shape
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_network")

RECORDED = {"num_speculative_tokens": 9, "beam_width": 3, "beam_length": 4}
OTHER = {"num_speculative_tokens": 12, "beam_width": 2, "beam_length": 6}
SHAPE = ReDrafterConfig(**RECORDED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that records no shape."""
    folder = tmp_path / "drafter"
    save_drafter(RecurrentHead(PROJECTED), folder, "org/target", training={"loss": 1e-05})
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("before", [None, OTHER], ids=["no shape", "another"])
def test_the_checkpoint_is_as_if_it_had_been_saved_with_the_shape(
    tmp_path: Path, before: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = RecurrentHead(PROJECTED)
    for name, shape in (("before", before), ("expected", RECORDED)):
        save_drafter(drafter, tmp_path / name, "org/target", shape, training={"loss": 1e-05})
    config = tmp_path / "before" / "config.json"
    config.chmod(0o640)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save_shape("~/before", SHAPE) == config
    assert shape_of(read_config(str(config.parent))) == RECORDED
    assert content(tmp_path / "before") == content(tmp_path / "expected")
    assert config.stat().st_mode & 0o777 == 0o640


def test_every_other_entry_stays(folder: Path) -> None:
    method = {"proposal_type": "greedy", "speculative_tokens": 5, "accept": 1}
    recorded = {"verifier": {"name_or_path": "ö"}, "default_proposal_method": "greedy"}
    recorded |= {"proposal_methods": [method, {"proposal_type": "b"}]}
    sizes = {"model_type": "redrafter_gated", "vocab_size": 11, "hidden_size": 4}
    by_hand = {**sizes, "rate": 1.5e-3, "café": "é", "speculators_config": recorded}
    (folder / "config.json").write_text(json.dumps(by_hand, ensure_ascii=False))
    save_shape(str(folder), SHAPE)
    method |= {"speculative_tokens": 9, "beam_width": 3, "beam_length": 4}
    found = json.loads((folder / "config.json").read_text())
    assert found == by_hand and list(found) == list(by_hand)


def test_how_nodes_are_accepted_is_recorded_where_it_was_measured(folder: Path) -> None:
    edit_config(folder, lambda v: v["speculators_config"].update(proposal_methods=[]))
    measured = PerSampling(sampled=AcceptanceRecord(0.5, (0.25,), ((0.75, 0.125),)))
    save_shape(str(folder), SHAPE, measured)
    save_shape(str(folder), SHAPE)
    recorded = read_config(str(folder))
    assert acceptance_of(recorded) == measured and shape_of(recorded) == RECORDED


# --- Refusals: nothing is written ---


def assert_refused(model: str, message: str) -> None:
    before = content(Path(model)) if Path(model).is_dir() else None
    for refused in (check_recordable, lambda m: save_shape(m, SHAPE)):
        with pytest.raises(ConfigError, match=message):
            refused(model)
    assert before is None or content(Path(model)) == before


@pytest.mark.parametrize("methods", [None, "many", {"a": 1}, [3]])
def test_a_format_without_a_place_for_it(folder: Path, methods: Any) -> None:
    if methods is None:
        edit_config(folder, lambda values: values.pop("speculators_config"))
        message = rf"drafter/config.json has no speculators_config.*convert {folder} FOLDER"
    else:
        edit_config(folder, lambda v: v["speculators_config"].update(proposal_methods=methods))
        message = rf"must be a list of objects, got {re.escape(repr(methods))}: delete"
    assert_refused(str(folder), message)


def test_what_is_no_folder_or_is_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("org/drafter", "./nowhere"):
        assert_refused(model, rf"--record: '{model}' is not a folder.*evaluate its folder")
    # Asked of the system, because root may write to folders of any mode.
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    message = r"drafter/config.json cannot be written: the folder is read-only; .*a copy"
    assert_refused(str(folder), message)


def test_a_full_disk_leaves_the_file_as_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(folder)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be written: .*No space left on device"):
        save_shape(str(folder), SHAPE)
    assert full.called and content(folder) == before
