"""Reading and writing drafter checkpoints: folders with config.json and model.safetensors.

Three spellings of the tensor names are read: our own, which is Apple's; and the two older ones
that TensorRT-LLM's converter also accepted (`input_projs.*` with `lm_heads.*`, and `0.*`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_redrafter.config import MODEL_TYPE, ConfigError, DrafterConfig
from vllm_redrafter.drafter import Drafter

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
DRAFT_TO_TARGET = "d2t"
_OLD_NAMES = (
    (re.compile(r"^input_projs\."), "input_proj."),
    (re.compile(r"^(lm_heads|0)\."), "lm_head."),
)
_LOAD_ERRORS = (OSError, EntryNotFoundError, HfHubHTTPError, HFValidationError, ValueError)


def resolve_file(model: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a checkpoint folder or hub repository; None where the checkpoint has no such file.

    Raises:
        ConfigError: there is neither such a folder nor such a repository within reach.
    """
    if not model:
        raise ConfigError("the speculative model's name is empty; give a folder or a hub id")
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):
        path = folder / name
        return path if path.is_file() else None
    if os.path.isfile(folder):
        raise ConfigError(f"speculative model {model!r} is a file; give the checkpoint's folder")
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"speculative model {model!r}: no such folder")
    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except _LOAD_ERRORS as error:
        # "Not there" in the cache of a machine that cannot reach the hub says nothing.
        missing = isinstance(error, EntryNotFoundError)
        if missing and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise ConfigError(
            f"speculative model {model!r}: no such folder, and not to be had from the hub: {error}"
        ) from error


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """A checkpoint's config.json; empty where it has none.

    Raises:
        ConfigError: no such checkpoint, or its config.json is not a JSON object.
    """
    path = resolve_file(model, CONFIG_FILE, revision)
    if path is None:
        return {}
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def is_redrafter(config: Mapping[str, Any]) -> bool:
    """Does this config.json belong to a ReDrafter checkpoint?"""
    return config.get("model_type") == MODEL_TYPE


def load_config(model: str, revision: str | None = None) -> DrafterConfig:
    """The drafter's sizes.

    Raises:
        ConfigError: no such checkpoint, or not a ReDrafter's.
    """
    values = read_config(model, revision)
    if not is_redrafter(values):
        found = values.get("model_type", "none")
        raise ConfigError(
            f"{model!r} is not a ReDrafter checkpoint: its config.json must say "
            f'"model_type": "{MODEL_TYPE}", found {found!r}'
        )
    return DrafterConfig.from_dict(values)


def check_checkpoint(model: str, revision: str | None = None) -> DrafterConfig:
    """Check a checkpoint's tensors by name and shape, without reading them.

    Raises:
        ConfigError: see `load_drafter`.
    """
    config = load_config(model, revision)
    path = weights_path(model, revision)
    try:
        with safe_open(path, framework="pt") as file:
            names = own_names(str(path), file.keys())
            shapes = {own: file.get_slice(name).get_shape() for own, name in names.items()}
            d2t = file.get_tensor(DRAFT_TO_TARGET) if DRAFT_TO_TARGET in names else None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not readable as safetensors: {error}") from error
    check_tensors(str(path), config, shapes, d2t)
    return config


def load_drafter(
    model: str, dtype: torch.dtype = torch.float32, revision: str | None = None
) -> Drafter:
    """Read a checkpoint and check every tensor's name and shape.

    Args:
        model: a folder, or a hub repository's id.
        dtype: of the returned parameters.
        revision: of the hub repository.

    Raises:
        ConfigError: missing, misshapen or unknown tensors, all of them listed.
    """
    config = check_checkpoint(model, revision)
    return build_drafter(config, load_file(weights_path(model, revision)), dtype)


def build_drafter(
    config: DrafterConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Drafter:
    """A drafter for inference of these tensors; they are kept, not copied, where dtypes agree.

    Args:
        config: its sizes.
        tensors: by any of their names; they have passed `check_tensors`.
        dtype: of the parameters; None for the tensors' own.
    """
    with torch.device("meta"):
        drafter = Drafter(config)
    converted = {
        own_name(name): tensor.to(dtype) if tensor.is_floating_point() else tensor.long()
        for name, tensor in tensors.items()
    }
    drafter.load_state_dict(converted, assign=True)
    return drafter.eval().requires_grad_(False)


def save_drafter(
    drafter: Drafter, folder: str | Path, verifier: str | None = None, **extra: Any
) -> None:
    """Write a checkpoint folder.

    Args:
        drafter: what to write.
        folder: made if it does not exist.
        verifier: the target's name or path, recorded under `speculators_config`.
        extra: further entries of config.json, such as training settings.
    """
    further = {
        "speculators_config": {
            "algorithm": "redrafter",
            "verifier": {"name_or_path": verifier},
        },
        **extra,
    }
    write_files(drafter, Path(folder), "RecurrentDrafter", further)


def write_files(
    drafter: Drafter, folder: Path, architecture: str, further: Mapping[str, Any]
) -> None:
    """Write config.json and model.safetensors.

    Args:
        drafter: what to write.
        folder: made if it does not exist.
        architecture: the class that transformers is told.
        further: entries of config.json besides the sizes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [architecture],
        **{key: value for key, value in vars(drafter.config).items() if value is not None},
        "torch_dtype": str(drafter.last_layer.weight.dtype).removeprefix("torch."),
        **further,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def verifier_of(config: Mapping[str, Any]) -> str | None:
    """The target that a config.json names under `speculators_config`, if it does."""
    entry: Any = config
    for key in ("speculators_config", "verifier", "name_or_path"):
        entry = entry.get(key) if isinstance(entry, Mapping) else None
    return entry if isinstance(entry, str) else None


def own_name(name: str) -> str:
    """Our (and Apple's) name of a tensor that TensorRT-LLM's converter named differently."""
    for pattern, replacement in _OLD_NAMES:
        name = pattern.sub(replacement, name)
    return name


def own_names(where: str, names: Iterable[str]) -> dict[str, str]:
    """From our names of tensors to those that a file gives them.

    Raises:
        ConfigError: the file has a tensor twice, under two of its names.
    """
    found: dict[str, str] = {}
    for name in names:
        own = own_name(name)
        if own in found:
            raise ConfigError(f"{where}: {found[own]} and {name} are the same tensor; keep one")
        found[own] = name
    return found


def check_tensors(
    where: str, config: DrafterConfig, shapes: Mapping[str, list[int]], d2t: Tensor | None
) -> None:
    """Check that tensors are those of a drafter of these sizes.

    Args:
        where: what messages call them.
        config: the sizes.
        shapes: of all tensors, by own name.
        d2t: the map of the draft vocabulary, if there is one.

    Raises:
        ConfigError: missing, misshapen or unknown tensors, all of them listed; or an impossible
            map.
    """
    with torch.device("meta"):
        expected = Drafter(config).state_dict()
    _check_shapes(where, {name: list(t.shape) for name, t in expected.items()}, shapes)
    if d2t is not None:
        _check_draft_vocabulary(where, d2t, config.vocab_size)


def weights_path(model: str, revision: str | None = None) -> Path:
    """A checkpoint's model.safetensors.

    Raises:
        ConfigError: it has none.
    """
    path = resolve_file(model, WEIGHTS_FILE, revision)
    if path is None:
        raise ConfigError(
            f"{model!r}: the checkpoint has no {WEIGHTS_FILE}; where it has other weights, "
            "`vllm-redrafter convert` makes one"
        )
    return path


def _check_shapes(
    path: str, expected: Mapping[str, list[int]], found: Mapping[str, list[int]]
) -> None:
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unknown {name}" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])}, config.json asks for {want}"
        for name, want in expected.items()
        if name in found and list(found[name]) != want
    ]
    if problems:
        raise ConfigError(f"{path} does not fit its config.json: {'; '.join(problems)}")


def _check_draft_vocabulary(path: str, d2t: Tensor, vocab_size: int) -> None:
    if d2t.is_floating_point():
        raise ConfigError(f"{path}: d2t must hold integers, has {d2t.dtype}")
    tokens = torch.arange(len(d2t)) + d2t.long()
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ConfigError(
            f"{path}: d2t points to token {int(outside[0])}, outside the target's vocabulary of "
            f"{vocab_size}"
        )
    if len(torch.unique(tokens)) < len(tokens):
        raise ConfigError(f"{path}: d2t names a token of the target twice")
