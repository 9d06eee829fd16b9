# SPDX-License-Identifier: Apache-2.0
"""Weights are found and read in every format they come in; a damaged one is named."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_redrafter.checkpoints import drafter_files, weight_files
from vllm_redrafter.checkpoints.weight_files import find_weights, read_weights
from vllm_redrafter.utils.errors import ConfigError

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
SAFE_INDEX, PICKLE_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def read(folder: Path) -> dict[str, Tensor]:
    return read_weights(find_weights(str(folder)))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def save(weights: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)


def write_shards(folder: Path, index: str = SAFE_INDEX) -> None:
    suffix = index.removesuffix(".index.json").rpartition(".")[2]
    names = {name: f"part-{number}.{suffix}" for number, name in enumerate(WEIGHTS)}
    for name, file in names.items():
        save({name: WEIGHTS[name]}, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "drafter.pt"])
def test_one_file(tmp_path: Path, name: str) -> None:
    save(WEIGHTS, tmp_path / name)
    assert_equal(read(tmp_path), WEIGHTS)
    if not name.endswith(".safetensors"):
        torch.save(WEIGHTS, tmp_path / name, _use_new_zipfile_serialization=False)
        assert_equal(read(tmp_path), WEIGHTS)


def test_shards_are_read_and_safetensors_come_before_pickles(tmp_path: Path) -> None:
    for index in (PICKLE_INDEX, SAFE_INDEX):
        write_shards(tmp_path, index)
        assert len(find_weights(str(tmp_path))) == 2
        assert_equal(read(tmp_path), WEIGHTS)
        torch.save({}, tmp_path / "pytorch_model.bin")
        torch.save({}, tmp_path / "drafter.pt")
    save_file({"a": WEIGHTS["a"]}, tmp_path / "model.safetensors")
    assert_equal(read(tmp_path), {"a": WEIGHTS["a"]})


def test_pickled_tensors_that_share_memory_come_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    stored = {"a": nn.Parameter(whole), "tied": whole, "b": whole.T, "c": whole[:, 1]}
    torch.save(stored, tmp_path / "x.pt")
    found = read(tmp_path)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in found.values())
    save_file(found, tmp_path / "model.safetensors")  # refuses shared memory
    assert_equal(read(tmp_path), stored)


def test_other_numbers_of_files_than_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no weights; looked for model\.safetensors"):
        find_weights(str(tmp_path))
    for name in ("b.pt", "a.pt"):
        torch.save(WEIGHTS, tmp_path / name)
    with pytest.raises(ConfigError, match=r"which of a\.pt, b\.pt holds the weights\?"):
        find_weights(str(tmp_path))


def test_a_missing_shard_and_a_tensor_in_two_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(WEIGHTS, tmp_path / "part-1.safetensors")
    with pytest.raises(ConfigError, match=r"part-1\.safetensors: an earlier shard has a already"):
        read(tmp_path)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"the shard part-1\.safetensors is missing"):
        find_weights(str(tmp_path))


OUTSIDE = ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "", "..", 3]
BROKEN = ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}']


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *[(json.dumps({"weight_map": {"a": file}}), "not the name of a file") for file in OUTSIDE],
        *[(text, r"index\.json: expected a JSON object with a weight_map") for text in BROKEN],
        ('{"weight_map": {}}', "its weight_map is empty"),
    ],
)
def test_an_index_names_files_beside_it(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / SAFE_INDEX).write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_weights(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, kept: int) -> None:
    path = tmp_path / name
    save(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=f"{name}: not readable as"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nn.Linear(1, 1), r"x\.pt: not readable as a state dict of tensors"),
        ([WEIGHTS["a"]], "expected a state dict, got list"),
        ({**WEIGHTS, "model": dict(WEIGHTS), "step": 3}, "but 'model', 'step' is none"),
        ({"model": torch.eye(2).to_sparse(), "step": "3"}, "but 'model', 'step' is none"),
    ],
    ids=["module", "list", "nested", "sparse"],
)
def test_a_pickle_of_other_things_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_a_lone_pickle_of_a_hub_repository_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(WEIGHTS, tmp_path / "drafter.pt")

    def download(repo: str, name: str, revision: str | None = None) -> str:
        if name != "drafter.pt":
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    listed = Mock(return_value=["README.md", "drafter.pt", "runs/optimizer.pt"])
    monkeypatch.setattr(drafter_files, "hf_hub_download", download)
    monkeypatch.setattr(weight_files, "list_repo_files", listed)
    assert_equal(read_weights(find_weights("org/drafter")), WEIGHTS)
    listed.side_effect = ConnectionError("refused")
    with pytest.raises(ConfigError, match=r"'org/drafter': .*hub .*its files: refused"):
        find_weights("org/drafter")
