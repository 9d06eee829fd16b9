# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are read under every name they were written in; what is wrong with one is said."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from redrafter_testing.models.checkpoints import (
    BARE,
    PLAIN,
    PROJECTED,
    edit_config,
    edit_tensors,
    numbered_name,
    plural_name,
)
from vllm_redrafter.checkpoints import drafter_files
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


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


# --- What is read ---


@pytest.mark.parametrize("config", [PROJECTED, PLAIN, BARE], ids=["projected", "plain", "bare"])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_saved_is_loaded_for_inference_in_the_dtype_asked_for(
    folder: Path, config: RecurrentConfig, saved: torch.dtype, wanted: torch.dtype
) -> None:
    drafter = RecurrentHead(config).to(saved)
    save_drafter(drafter, folder)  # replaces the other one
    loaded = load_drafter(str(folder), dtype=wanted)
    assert loaded.config == config
    assert_equal(loaded.state_dict(), drafter.to(wanted).state_dict())
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


class Copied(TorchDispatchMode):
    """Counts the bytes of all tensors made of others' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.clone):
            self.bytes += made.nbytes
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_copied_once_and_then_do_not_follow_the_file(
    dtype: torch.dtype, folder: Path
) -> None:
    with Copied() as copied:
        drafter = load_drafter(str(folder), dtype)
    assert copied.bytes == sum(weights.nbytes for weights in drafter.parameters())
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    file = folder / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))  # as `cp` over it does
    assert_equal(drafter.state_dict(), before)


@pytest.mark.parametrize(("rename", "config"), [(plural_name, PROJECTED), (numbered_name, PLAIN)])
def test_every_naming_scheme_is_read(
    folder: Path, rename: Callable[[str], str], config: RecurrentConfig
) -> None:
    drafter = RecurrentHead(config)
    save_drafter(drafter, folder)
    renamed = {rename(name): tensor for name, tensor in drafter.state_dict().items()}
    assert not renamed.keys() & {"input_proj.weight", "lm_head.0.linear.weight"}
    save_file(renamed, folder / "model.safetensors")
    assert_equal(load_drafter(str(folder)).state_dict(), drafter.state_dict())


def test_config_json_says_what_the_checkpoint_is_and_what_it_drafts_for(tmp_path: Path) -> None:
    save_drafter(RecurrentHead(PROJECTED).bfloat16(), tmp_path, verifier="org/target", training={})
    values = json.loads((tmp_path / "config.json").read_text())
    recorded = {"algorithm": "redrafter", "verifier": {"name_or_path": "org/target"}}
    assert values["speculators_config"] == recorded
    assert values["architectures"] == ["RecurrentDrafter"]
    assert values["torch_dtype"] == "bfloat16" and values["training"] == {}
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


# --- What is refused ---


def assert_refused(model: object, *parts: str) -> None:
    with pytest.raises(ConfigError) as error:
        Checkpoint.open(str(model)).checked()
    for part in parts:
        assert part in str(error.value)


def test_what_is_no_checkpoint_is_named(folder: Path) -> None:
    for model in ("/no/such/folder", "./no/such", "../no-such", "~/no/such"):
        assert_refused(model, f"drafter {model!r}: no such folder")
    weights = folder / "model.safetensors"
    assert_refused(weights, f"{str(weights)!r} is a file; give the checkpoint's folder")
    weights.unlink()
    assert_refused(folder, f"{str(folder)!r}: the checkpoint has no model.safetensors")
    (folder / "config.json").unlink()
    assert_refused(folder, f"{str(folder)!r} has no config.json")


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ({"model_type": "medusa"}, ('"recurrent_drafting_drafter" or "redrafter_g', "'medusa'")),
        ({"model_type": None}, ("is not a ReDrafter checkpoint", "found None")),
        (
            {"rnn": False, "num_draft_layers": 1},
            ("unknown rnn_u.weight", "unknown lm_head.1.linear.weight", "missing lm_head.1.weight"),
        ),
        ({"vocab_size": None}, ("vocab_size",)),
    ],
)
def test_a_config_of_another_drafter_is_refused(
    folder: Path, entries: dict[str, Any], parts: tuple[str, ...]
) -> None:
    edit_config(folder, lambda values: values.update(entries))
    assert_refused(folder, *parts)


def test_missing_and_misshapen_tensors_are_all_listed_at_once(folder: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors["rnn_w.weight"]
        tensors["lm_head.2.weight"] = torch.zeros(12, 6)

    edit_tensors(folder, damage)
    assert_refused(
        folder,
        f"{folder / 'model.safetensors'} does not fit its config.json: ",
        "missing rnn_w.weight",
        "lm_head.2.weight has shape [12, 6], config.json asks for [11, 6]",
    )


# --- The hub ---


def test_a_hub_id_is_resolved_by_huggingface_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = Mock(side_effect=lambda repo, name, **_: str(folder / name))
    monkeypatch.setattr(drafter_files, "hf_hub_download", download)
    drafter = load_drafter("org/drafter", revision="v2")
    assert_equal(drafter.state_dict(), load_file(folder / "model.safetensors"))
    for name in ("config.json", "model.safetensors"):
        download.assert_any_call("org/drafter", name, revision="v2")


@pytest.mark.parametrize(
    "problem",
    [
        RepositoryNotFoundError("404 Client Error", response=Mock()),
        ConnectionError("connection refused"),
        LocalEntryNotFoundError("check your connection"),
    ],
    ids=["no such repository", "no connection", "offline and not in the cache"],
)
def test_a_hub_out_of_reach_is_an_error_that_names_the_model(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_files, "hf_hub_download", Mock(side_effect=problem))
    parts = "'org/drafter': no such folder, and not to be had from the hub", str(problem)
    assert_refused("org/drafter", *parts)
