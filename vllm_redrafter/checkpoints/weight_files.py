# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's weights in every format of Hugging Face and PyTorch; safetensors are served."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vllm_redrafter.checkpoints.drafter_files import WEIGHTS_FILE, resolve_file
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.json_files import read_json

INDEX = ".index.json"
FILES = (WEIGHTS_FILE, WEIGHTS_FILE + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX)
"""In the order in which transformers looks for them."""
SERVED = FILES[:2]

_UNREADABLE = (OSError, MemoryError, RuntimeError, SafetensorError)
"""What reading safetensors raises: RuntimeError and MemoryError where a file cannot be mapped."""
_PICKLE_ERRORS = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)


class _Files(tuple[Path, ...]):
    """Of one format; in messages their name is the one file's, or the folder's."""

    def __str__(self) -> str:
        return str(self[0]) if len(self) == 1 else f"{self[0].parent} ({len(self)} shards)"


def find_weights(model: str, revision: str | None = None, names: Sequence[str] = FILES) -> _Files:
    """The files that hold a checkpoint's weights, all of one format; downloaded from the hub."""
    for name in names:
        if path := resolve_file(model, name, revision):
            return _Files(_shards(model, path, revision) if name.endswith(INDEX) else [path])
    remedy = f"where it has other weights, `vllm-redrafter convert {model} FOLDER` writes them so"
    if names == FILES:
        remedy = "give the file that holds the weights one of these names"
    raise ConfigError(f"{model!r}: the checkpoint has no {' or '.join(names)}; {remedy}")


def read_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """All tensors of these files on the CPU, by the files' names; code in pickles does not run.

    Those of safetensors are mapped: their numbers are read when they are used.
    """
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ConfigError(f"{path}: an earlier shard has {', '.join(twice)} already")
        tensors |= found
    return tensors


def _shards(model: str, index: Path, revision: str | None) -> list[Path]:
    """The files that an index names."""
    try:
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index}: expected a JSON object with a weight_map from tensors to files: {error!r}"
        ) from error
    paths = []
    for name in names:
        # A shard lies beside its index; other paths could lead to any file of the user.
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise ConfigError(f"{index}: {name!r} is not the name of a file beside it")
        path = resolve_file(model, name, revision)
        if path is None:
            raise ConfigError(f"{index}: the shard {name} is missing; fetch the checkpoint again")
        paths.append(path)
    if not paths:
        raise ConfigError(f"{index}: its weight_map is empty")
    return paths


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: not readable as safetensors: {one_line(error)}") from error
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _PICKLE_ERRORS as error:
        # Not torch's message: it is long, and recommends to run the code in the file.
        raise ConfigError(
            f"{path}: not readable as a state dict of tensors; code in it is not run. If it is "
            "your own pickled module, write torch.save(module.state_dict(), ...) instead"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a state dict, got {type(content).__name__}")
    if others := [name for name, value in content.items() if not _is_dense(name, value)]:
        raise ConfigError(
            f"{path}: expected a state dict of dense tensors, but {', '.join(map(repr, others))} "
            "is none; if the state dict is nested in there, save it alone"
        )
    return {name: tensor.detach() for name, tensor in content.items()}


def _is_dense(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided
