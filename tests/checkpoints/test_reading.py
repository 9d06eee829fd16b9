# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are read under every name they were written in; what is wrong with one is said."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import (
    EntryNotFoundError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from redrafter_testing.models.checkpoints import (
    BARE,
    PLAIN,
    PROJECTED,
    edit_config,
    edit_tensors,
    numbered_name,
    plural_name,
)
from vllm_redrafter.checkpoints import drafter_files, reading
from vllm_redrafter.checkpoints.drafter_files import read_config, resolve_file
from vllm_redrafter.checkpoints.reading import Checkpoint, load_drafter
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid checkpoint, for the tests to damage."""
    save_drafter(RecurrentHead(PROJECTED), tmp_path)
    return tmp_path


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# --- What is read ---


@pytest.mark.parametrize("config", [PROJECTED, PLAIN, BARE], ids=["projected", "plain", "bare"])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_saved_is_loaded_for_inference_in_the_dtype_asked_for(
    tmp_path: Path, config: RecurrentConfig, saved: torch.dtype, wanted: torch.dtype
) -> None:
    save_drafter(RecurrentHead(PLAIN), tmp_path / "new" / "folder")
    drafter = RecurrentHead(config).to(saved)
    save_drafter(drafter, tmp_path / "new" / "folder")  # replaces the other one
    loaded = load_drafter(str(tmp_path / "new" / "folder"), dtype=wanted)
    assert loaded.config == config
    assert_equal(loaded.state_dict(), drafter.to(wanted).state_dict())
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("rename", "config", "names"),
    [
        (
            plural_name,
            PROJECTED,
            "input_projs.bias input_projs.weight lm_heads.0.linear.bias lm_heads.0.linear.weight "
            "lm_heads.1.linear.bias lm_heads.1.linear.weight lm_heads.2.weight "
            "rnn_u.bias rnn_u.weight rnn_w.weight",
        ),
        (numbered_name, PLAIN, "0.0.linear.bias 0.0.linear.weight 0.1.weight"),
    ],
)
def test_every_naming_scheme_is_read(
    tmp_path: Path, rename: Callable[[str], str], config: RecurrentConfig, names: str
) -> None:
    drafter = RecurrentHead(config)
    save_drafter(drafter, tmp_path)
    renamed = {rename(name): tensor for name, tensor in drafter.state_dict().items()}
    assert sorted(renamed) == names.split()
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal(load_drafter(str(tmp_path)).state_dict(), drafter.state_dict())


def test_config_json_says_what_the_checkpoint_is_and_what_it_drafts_for(tmp_path: Path) -> None:
    drafter = RecurrentHead(PROJECTED).bfloat16()
    save_drafter(drafter, tmp_path, verifier="org/target", training={"steps": 10})
    values = json.loads((tmp_path / "config.json").read_text())
    assert values == {
        "model_type": "recurrent_drafting_drafter",
        "architectures": ["RecurrentDrafter"],
        "vocab_size": 11,
        "hidden_size": 4,
        "exit_dim": 6,
        "num_draft_layers": 2,
        "rnn": True,
        "num_lookback_tokens": -1,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "redrafter",
            "verifier": {"name_or_path": "org/target"},
        },
        "training": {"steps": 10},
    }
    assert Checkpoint.open(str(tmp_path)).head == PROJECTED


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_of_any_new_file(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save_drafter(RecurrentHead(PLAIN), tmp_path / "drafter")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "drafter").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~mask)


def test_a_folder_is_found_by_tilde_and_before_a_hub_repository(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    for name in (f"~/{folder.name}", folder.name):
        assert Checkpoint.open(name).head == PROJECTED
    assert resolve_file(str(folder), "generation_config.json") is None
    (folder / "config.json").unlink()
    assert read_config(str(folder)) == {}


def test_a_checkpoint_is_checked_without_reading_its_tensors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "load_file", None)
    assert Checkpoint.open(str(folder)).checked().head == PROJECTED


# --- What is refused ---


def assert_refused(model: object, *parts: str) -> None:
    with pytest.raises(ConfigError) as error:
        Checkpoint.open(str(model)).checked()
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("model", ["/no/such/folder", "./no/such", "../no-such", "~/no/such"])
def test_a_path_without_a_folder_is_named(model: str) -> None:
    assert_refused(model, f"drafter {model!r}: no such folder")


def test_what_is_no_checkpoint_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    assert_refused(weights, f"{str(weights)!r} is a file; give the checkpoint's folder")
    weights.unlink()
    assert_refused(folder, f"{str(folder)!r}: the checkpoint has no model.safetensors")
    (folder / "config.json").unlink()
    assert_refused(folder, f"{str(folder)!r} has no config.json")


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ({"model_type": "llama"}, ('"model_type": "recurrent_drafting_drafter"', "found 'llama'")),
        ({"model_type": None}, ("is not a ReDrafter checkpoint", "found None")),
        ({"vocab_size": None, "exit_dim": None}, ("vocab_size", "exit_dim")),
        ({"hidden_size": "4"}, ("hidden_size must be an integer", "got '4'")),
        (
            {"rnn": False, "num_draft_layers": 1},
            ("unknown rnn_u.weight", "unknown lm_head.1.linear.weight", "missing lm_head.1.weight"),
        ),
    ],
    ids=["another type", "no type", "no sizes", "a text", "another architecture"],
)
def test_a_config_of_another_drafter_is_refused(
    folder: Path, entries: dict[str, Any], parts: tuple[str, ...]
) -> None:
    edit_config(folder, lambda values: values.update(entries))
    if entries == {"vocab_size": None, "exit_dim": None}:
        edit_config(folder, lambda values: [values.pop(name) for name in entries])
    assert_refused(folder, *parts)


def test_missing_unknown_and_misshapen_tensors_are_all_listed_at_once(folder: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors["rnn_w.weight"]
        tensors["medusa.weight"] = torch.zeros(1)
        tensors["lm_head.2.weight"] = torch.zeros(12, 6)
        tensors["rnn_u.bias"] = torch.zeros(4, 1)

    edit_tensors(folder, damage)
    assert_refused(
        folder,
        f"{folder / 'model.safetensors'} does not fit its config.json: ",
        "missing rnn_w.weight",
        "unknown medusa.weight",
        "lm_head.2.weight has shape [12, 6], config.json asks for [11, 6]",
        "rnn_u.bias has shape [4, 1], config.json asks for [4]",
    )


# --- The hub ---


def test_a_hub_id_is_resolved_by_huggingface_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repo: str, name: str, revision: str | None = None) -> str:
        asked.append((repo, name, revision))
        return str(folder / name)

    monkeypatch.setattr(drafter_files, "hf_hub_download", download)
    drafter = load_drafter("org/drafter", revision="v2")
    assert_equal(drafter.state_dict(), load_file(folder / "model.safetensors"))
    names = ("config.json", "model.safetensors")
    assert set(asked) == {("org/drafter", name, "v2") for name in names}


@pytest.mark.parametrize(
    "problem",
    [
        EntryNotFoundError("404"),
        RepositoryNotFoundError("404 Client Error", response=Mock()),
        ConnectionError("connection refused"),
        LocalEntryNotFoundError("check your connection"),
    ],
    ids=["no such file", "no such repository", "no connection", "offline and not in the cache"],
)
def test_a_hub_out_of_reach_is_an_error_that_names_the_model(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise problem

    monkeypatch.setattr(drafter_files, "hf_hub_download", download)
    if type(problem) is EntryNotFoundError:
        assert resolve_file("org/drafter", "config.json") is None
        return
    parts = "'org/drafter': no such folder, and not to be had from the hub", str(problem)
    assert_refused("org/drafter", *parts)
