# SPDX-License-Identifier: Apache-2.0
"""Weights are found and read in every format they come in; a damaged one is named."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_redrafter.checkpoints.weight_files import find_weights, read_weights
from vllm_redrafter.utils.errors import ConfigError

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
SAFE_INDEX, PICKLE_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def read(folder: Path) -> dict[str, Tensor]:
    return read_weights(find_weights(str(folder)))


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


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


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_one_file(tmp_path: Path, name: str) -> None:
    save(WEIGHTS, tmp_path / name)
    assert_equal(read(tmp_path), WEIGHTS)
    if not name.endswith(".safetensors"):
        parameters = {key: nn.Parameter(tensor) for key, tensor in WEIGHTS.items()}
        torch.save(parameters, tmp_path / name, _use_new_zipfile_serialization=False)
        assert_equal(read(tmp_path), WEIGHTS)
        assert not read(tmp_path)["a"].requires_grad


def test_shards_are_read_and_safetensors_come_before_pickles(tmp_path: Path) -> None:
    for index in (PICKLE_INDEX, SAFE_INDEX):
        write_shards(tmp_path, index)
        assert len(find_weights(str(tmp_path))) == 2
        assert_equal(read(tmp_path), WEIGHTS)
        torch.save({}, tmp_path / "pytorch_model.bin")
    save_file({"a": WEIGHTS["a"]}, tmp_path / "model.safetensors")
    assert_equal(read(tmp_path), {"a": WEIGHTS["a"]})


def test_missing_weights_a_missing_shard_and_a_tensor_in_two_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model\.safetensors or .*; give the file"):
        find_weights(str(tmp_path))
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
        (nn.Linear(1, 1), r"model\.bin: not readable as a state dict of tensors"),
        ([WEIGHTS["a"]], "expected a state dict, got list"),
        ({**WEIGHTS, "model": dict(WEIGHTS), "step": 3}, "but 'model', 'step' is none"),
        ({"model": torch.eye(2).to_sparse(), "step": "3"}, "but 'model', 'step' is none"),
    ],
    ids=["module", "list", "nested", "sparse"],
)
def test_a_pickle_of_other_things_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)
