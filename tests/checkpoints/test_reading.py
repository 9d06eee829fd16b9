# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are read under every name they were written in; what is wrong with one is said."""

import json
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
from vllm_redrafter.checkpoints.reading import (
    Checkpoint,
    is_redrafter,
    load_drafter,
)
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is read without asking the hub."""

    def refuse(*args: Any, **kwargs: Any) -> str:
        raise AssertionError(f"the hub was asked for {args}")

    monkeypatch.setattr(drafter_files, "hf_hub_download", refuse)


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
def test_what_is_saved_is_loaded(tmp_path: Path, config: RecurrentConfig) -> None:
    drafter = RecurrentHead(config)
    save_drafter(drafter, tmp_path / "a" / "new" / "folder")
    loaded = load_drafter(str(tmp_path / "a" / "new" / "folder"))
    assert loaded.config == config
    assert_equal(loaded.state_dict(), drafter.state_dict())


def test_a_loaded_drafter_is_for_inference(folder: Path) -> None:
    drafter = load_drafter(str(folder))
    assert not drafter.training
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    assert {parameter.device.type for parameter in drafter.parameters()} == {"cpu"}


def apple_name(name: str) -> str:
    return name


@pytest.mark.parametrize(
    ("rename", "config", "names"),
    [
        (
            apple_name,
            PROJECTED,
            "input_proj.bias input_proj.weight lm_head.0.linear.bias lm_head.0.linear.weight "
            "lm_head.1.linear.bias lm_head.1.linear.weight lm_head.2.weight "
            "rnn_u.bias rnn_u.weight rnn_w.weight",
        ),
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


@pytest.mark.parametrize("name", ["lm_head.0.weight", "rnn_u.bias", "lm_head.10.linear.weight"])
def test_own_names_are_kept(name: str) -> None:
    assert RecurrentHead.own_name(name) == name


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_are_converted_to_the_type_asked_for(
    tmp_path: Path, saved: torch.dtype, wanted: torch.dtype
) -> None:
    drafter = RecurrentHead(PROJECTED).to(saved)
    save_drafter(drafter, tmp_path)
    assert_equal(
        load_drafter(str(tmp_path), dtype=wanted).state_dict(), drafter.to(wanted).state_dict()
    )


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
    assert is_redrafter(values)
    assert Checkpoint.open(str(tmp_path)).head == PROJECTED


def test_saving_over_a_checkpoint_replaces_it(folder: Path) -> None:
    drafter = RecurrentHead(PLAIN)
    save_drafter(drafter, folder)
    assert_equal(load_drafter(str(folder)).state_dict(), drafter.state_dict())


def test_a_tilde_is_the_home_folder(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert Checkpoint.open(f"~/{folder.name}").head == PROJECTED


def test_a_folder_takes_precedence_over_a_hub_repository(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert Checkpoint.open(folder.name).head == PROJECTED


def test_a_file_that_a_folder_lacks_is_none(folder: Path) -> None:
    assert resolve_file(str(folder), "config.json") == folder / "config.json"
    assert resolve_file(str(folder), "generation_config.json") is None


def test_a_folder_without_config_json_has_an_empty_config(tmp_path: Path) -> None:
    assert read_config(str(tmp_path)) == {}


def test_a_checkpoint_is_checked_without_reading_its_tensors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> dict[str, Tensor]:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(reading, "load_file", refuse)
    assert Checkpoint.open(str(folder)).checked().head == PROJECTED


# --- What is refused: not a checkpoint ---

Reader = Callable[[str], object]


def check(model: str) -> Checkpoint:
    return Checkpoint.open(model).checked()


@pytest.fixture(params=[load_drafter, check], ids=["load", "check"])
def read(request: pytest.FixtureRequest) -> Reader:
    """What refuses: reading a checkpoint, and only checking it."""
    reader: Reader = request.param
    return reader


@pytest.mark.parametrize("model", ["/no/such/folder", "./no/such", "../no-such", "~/no/such"])
def test_a_path_without_a_folder_is_named(read: Reader, model: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(model)
    assert str(error.value).startswith(f"drafter {model!r}: no such folder")


def test_a_file_instead_of_a_folder_is_named_and_the_folder_asked_for(
    read: Reader, folder: Path
) -> None:
    model = str(folder / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        read(model)
    assert f"{model!r} is a file; give the checkpoint's folder" in str(error.value)


@pytest.mark.parametrize("found", ["llama", "", None])
def test_another_model_type_is_named_beside_the_one_wanted(
    read: Reader, folder: Path, found: object
) -> None:
    edit_config(folder, lambda values: values.update(model_type=found))
    assert not is_redrafter(read_config(str(folder)))
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    message = str(error.value)
    assert f"{str(folder)!r} is not a ReDrafter checkpoint" in message
    assert '"model_type": "recurrent_drafting_drafter"' in message
    assert f"found {found!r}" in message


def test_no_config_json_is_not_a_redrafter_checkpoint(read: Reader, folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    assert f"{str(folder)!r} has no config.json" in str(error.value)


@pytest.mark.parametrize("content", [b"", b'{"vocab_size": ', b"\xff\xfe{}"])
def test_a_config_that_is_not_json_is_named(read: Reader, folder: Path, content: bytes) -> None:
    path = folder / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    assert f"{path}: not readable as JSON" in str(error.value)


@pytest.mark.parametrize(("content", "kind"), [("[]", "list"), ("3", "int"), ("null", "NoneType")])
def test_a_config_that_is_not_a_json_object_is_named(
    read: Reader, folder: Path, content: str, kind: str
) -> None:
    path = folder / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    assert f"{path}: expected a JSON object, got {kind}" in str(error.value)


def test_sizes_that_config_json_lacks_are_named(read: Reader, folder: Path) -> None:
    edit_config(folder, lambda values: (values.pop("vocab_size"), values.pop("exit_dim")))
    with pytest.raises(ConfigError, match="lacks vocab_size, exit_dim"):
        read(str(folder))


def test_an_invalid_size_is_named(read: Reader, folder: Path) -> None:
    edit_config(folder, lambda values: values.update(hidden_size="4"))
    with pytest.raises(ConfigError, match=r"hidden_size must be an integer .* got '4'"):
        read(str(folder))


def test_a_checkpoint_without_weights_is_named(read: Reader, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    assert f"{str(folder)!r}: the checkpoint has no model.safetensors" in str(error.value)


# --- What is refused: weights that do not fit ---


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_corrupted_weights_are_named(read: Reader, folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    assert f"{path}: not readable as safetensors" in str(error.value)


def test_missing_unknown_and_misshapen_tensors_are_all_listed_at_once(
    read: Reader, folder: Path
) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors["rnn_w.weight"]
        del tensors["lm_head.1.linear.bias"]
        tensors["medusa.weight"] = torch.zeros(1)
        tensors["lm_head.3.weight"] = torch.zeros(1)
        tensors["lm_head.2.weight"] = torch.zeros(12, 6)
        tensors["rnn_u.bias"] = torch.zeros(4, 1)

    edit_tensors(folder, damage)
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    path, _, problems = str(error.value).partition(" does not fit its config.json: ")
    assert path == str(folder / "model.safetensors")
    assert set(problems.split("; ")) == {
        "missing rnn_w.weight",
        "missing lm_head.1.linear.bias",
        "unknown medusa.weight",
        "unknown lm_head.3.weight",
        "lm_head.2.weight has shape [12, 6], config.json asks for [11, 6]",
        "rnn_u.bias has shape [4, 1], config.json asks for [4]",
    }


def test_weights_of_another_architecture_are_refused(read: Reader, folder: Path) -> None:
    edit_config(folder, lambda values: values.update(rnn=False, num_draft_layers=1))
    with pytest.raises(ConfigError) as error:
        read(str(folder))
    for name in ("rnn_u.weight", "rnn_u.bias", "rnn_w.weight", "lm_head.1.linear.weight"):
        assert f"unknown {name}" in str(error.value)
    assert "missing lm_head.1.weight" in str(error.value)


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
    assert set(asked) == {
        ("org/drafter", "config.json", "v2"),
        ("org/drafter", "model.safetensors", "v2"),
    }


def raise_from_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(drafter_files, "hf_hub_download", download)


def test_a_file_that_a_hub_repository_lacks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    raise_from_hub(monkeypatch, EntryNotFoundError("404"))
    assert resolve_file("org/drafter", "config.json") is None


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
    raise_from_hub(monkeypatch, problem)
    with pytest.raises(ConfigError) as error:
        load_drafter("org/drafter")
    assert "'org/drafter': no such folder, and not to be had from the hub" in str(error.value)
    assert str(problem) in str(error.value)
    assert error.value.__cause__ is problem


def test_what_is_no_hub_id_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The real function: it checks the id before it connects.
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="'no/such/folder': no such folder, and not to be had"):
        load_drafter("no/such/folder")
