# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's weights in every format of Hugging Face and PyTorch, for `conversion`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import list_repo_files
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors.torch import load_file
from torch import Tensor

from vllm_redrafter.checkpoints.drafter_files import UNREADABLE, WEIGHTS_FILE, resolve_file
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.json_files import read_json

INDEX = ".index.json"
FILES = (WEIGHTS_FILE, WEIGHTS_FILE + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX)
"""In the order in which transformers looks for them."""
LAST_RESORTS = (".safetensors", ".pt")
"""A single file of any name that ends so."""

_PICKLE_ERRORS = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)


def find_weights(model: str) -> list[Path]:
    """The files that hold a checkpoint's weights, all of one format; downloaded from the hub."""
    for name in FILES:
        if path := resolve_file(model, name):
            return _shards(model, path) if name.endswith(INDEX) else [path]
    every = _file_names(model)
    for suffix in LAST_RESORTS:
        names = sorted(name for name in every if name.endswith(suffix))
        if len(names) > 1:
            raise ConfigError(
                f"{model!r}: which of {', '.join(names)} holds the weights? Keep only that file "
                "in the folder"
            )
        if names and (path := resolve_file(model, names[0])):
            return [path]
    raise ConfigError(
        f"{model!r}: the checkpoint has no weights; looked for {', '.join(FILES)}, "
        f"{' and '.join(f'*{suffix}' for suffix in LAST_RESORTS)}"
    )


def read_weights(paths: list[Path]) -> dict[str, Tensor]:
    """All tensors of these files on the CPU, by the files' names; code in pickles does not run."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise ConfigError(f"{path}: an earlier shard has {', '.join(twice)} already")
        tensors |= found
    return tensors


def _shards(model: str, index: Path) -> list[Path]:
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
        path = resolve_file(model, name)
        if path is None:
            raise ConfigError(f"{index}: the shard {name} is missing; fetch the checkpoint again")
        paths.append(path)
    if not paths:
        raise ConfigError(f"{index}: its weight_map is empty")
    return paths


def _file_names(model: str) -> list[str]:
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return [path.name for path in folder.iterdir()]
    try:
        names = list_repo_files(model)
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"{model!r}: the hub does not tell its files: {error}") from error
    return [name for name in names if "/" not in name]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except UNREADABLE as error:
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
    # Tensors of a pickle may share memory (tied, or cut from one storage); safetensors refuses it.
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in content.items()
    }


def _is_dense(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided
