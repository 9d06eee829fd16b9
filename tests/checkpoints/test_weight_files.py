# SPDX-License-Identifier: Apache-2.0
"""Weights are found and read in every format they come in; a damaged one is named."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_redrafter.checkpoints import drafter_files, weight_files
from vllm_redrafter.checkpoints.weight_files import find_weights, read_weights
from vllm_redrafter.utils.errors import ConfigError

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def read(folder: Path) -> dict[str, Tensor]:
    return read_weights(find_weights(str(folder)))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def write_shards(folder: Path, index: str, suffix: str) -> None:
    names = {name: f"part-{number}{suffix}" for number, name in enumerate(WEIGHTS)}
    for name, file in names.items():
        if suffix == ".bin":
            torch.save({name: WEIGHTS[name]}, folder / file)
        else:
            save_file({name: WEIGHTS[name]}, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": names}))


# --- What is read ---


def test_one_safetensors_file(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert_equal(read(tmp_path), WEIGHTS)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "drafter.pt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_one_pickled_state_dict(tmp_path: Path, name: str, zipped: bool) -> None:
    torch.save(WEIGHTS, tmp_path / name, _use_new_zipfile_serialization=zipped)
    assert_equal(read(tmp_path), WEIGHTS)


@pytest.mark.parametrize(
    ("index", "suffix"),
    [
        ("model.safetensors.index.json", ".safetensors"),
        ("pytorch_model.bin.index.json", ".bin"),
    ],
)
def test_shards(tmp_path: Path, index: str, suffix: str) -> None:
    write_shards(tmp_path, index, suffix)
    assert len(find_weights(str(tmp_path))) == 2
    assert_equal(read(tmp_path), WEIGHTS)


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    torch.save({}, tmp_path / "drafter.pt")
    write_shards(tmp_path, "model.safetensors.index.json", ".safetensors")
    assert_equal(read(tmp_path), WEIGHTS)
    save_file({"a": WEIGHTS["a"]}, tmp_path / "model.safetensors")
    assert_equal(read(tmp_path), {"a": WEIGHTS["a"]})


def test_pickled_tensors_that_share_memory_come_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": whole, "tied": whole, "b": whole.T, "c": whole[:, 1]}, tmp_path / "x.pt")
    found = read(tmp_path)
    assert all(tensor.is_contiguous() for tensor in found.values())
    save_file(found, tmp_path / "model.safetensors")  # refuses shared memory
    assert_equal(read(tmp_path), {"a": whole, "tied": whole, "b": whole.T, "c": whole[:, 1]})


def test_parameters_are_read_as_tensors(tmp_path: Path) -> None:
    torch.save({"a": nn.Parameter(WEIGHTS["a"])}, tmp_path / "x.pt")
    assert not read(tmp_path)["a"].requires_grad


# --- What is refused ---


def test_no_weights_are_named_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no weights; looked for model\.safetensors, .*\*\.p"
    ):
        find_weights(str(tmp_path))


def test_several_pickles_are_named(tmp_path: Path) -> None:
    for name in ("b.pt", "a.pt"):
        torch.save(WEIGHTS, tmp_path / name)
    with pytest.raises(ConfigError, match=r"which of a\.pt, b\.pt holds the weights\?"):
        find_weights(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, "model.safetensors.index.json", ".safetensors")
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"the shard part-1\.safetensors is missing"):
        find_weights(str(tmp_path))


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "", "..", 3]
)
def test_an_index_cannot_point_outside_its_folder(tmp_path: Path, file: object) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ConfigError, match="is not the name of a file beside it"):
        find_weights(str(tmp_path))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}']
)
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json: expected a JSON object with a weight_map"):
        find_weights(str(tmp_path))


def test_an_empty_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ConfigError, match="its weight_map is empty"):
        find_weights(str(tmp_path))


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, "model.safetensors.index.json", ".safetensors")
    save_file(WEIGHTS, tmp_path / "part-1.safetensors")
    with pytest.raises(ConfigError, match=r"part-1\.safetensors: an earlier shard has a already"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, kept: int) -> None:
    path = tmp_path / name
    if name.endswith(".bin"):
        torch.save(WEIGHTS, path)
    else:
        save_file(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=f"{name}: not readable as"):
        read(tmp_path)


class Trap:
    """Its pickle calls a function; here a harmless one."""

    def __reduce__(self) -> object:
        return print, ("code of the pickle ran",)


@pytest.mark.parametrize("content", [nn.Linear(1, 1), {"a": Trap()}], ids=["module", "code"])
def test_code_in_a_pickle_is_refused_and_does_not_run(
    tmp_path: Path, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"x\.pt: not readable as a state dict of tensors"):
        read(tmp_path)
    assert capsys.readouterr().out == ""


def test_what_is_no_state_dict_is_named(tmp_path: Path) -> None:
    torch.save([WEIGHTS["a"]], tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="expected a state dict, got list"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"model": dict(WEIGHTS), "step": 3},
        {"model": torch.eye(2).to_sparse(), "step": "3"},
    ],
    ids=["nested", "sparse"],
)
def test_entries_that_are_no_dense_tensors_are_named(
    tmp_path: Path, content: dict[str, object]
) -> None:
    torch.save({**WEIGHTS, **content}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="but 'model', 'step' is none"):
        read(tmp_path)


# --- The hub ---


def test_a_lone_pickle_of_a_hub_repository_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(WEIGHTS, tmp_path / "drafter.pt")

    def download(repo: str, name: str, revision: str | None = None) -> str:
        if name != "drafter.pt":
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    monkeypatch.setattr(drafter_files, "hf_hub_download", download)
    names = ["README.md", "drafter.pt", "runs/optimizer.pt"]
    monkeypatch.setattr(weight_files, "list_repo_files", lambda model: names)
    assert_equal(read_weights(find_weights("org/drafter")), WEIGHTS)


def test_a_hub_that_does_not_tell_its_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise EntryNotFoundError("404")

    def refuse(model: str) -> list[str]:
        raise ConnectionError("refused")

    monkeypatch.setattr(drafter_files, "hf_hub_download", download)
    monkeypatch.setattr(weight_files, "list_repo_files", refuse)
    with pytest.raises(
        ConfigError, match="'org/drafter': the hub does not tell its files: refused"
    ):
        find_weights("org/drafter")
