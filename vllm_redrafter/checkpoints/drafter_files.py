# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's files are: in a folder, or in a repository of the Hugging Face hub."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from safetensors import SafetensorError

from vllm_redrafter.checkpoints.shipped import PREFIX, shipped_drafter
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.hub import check_within_reach
from vllm_redrafter.utils.json_files import read_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
UNREADABLE = (OSError, MemoryError, RuntimeError, SafetensorError)
"""What reading safetensors raises: RuntimeError and MemoryError where a file cannot be mapped."""

_LOAD_ERRORS = (OSError, EntryNotFoundError, HfHubHTTPError, HFValidationError, ValueError)


def resolve_file(
    model: str, name: str, revision: str | None = None, what: str = "drafter"
) -> Path | None:
    """A file of a folder, or of a hub repository; None where the checkpoint has no such file.

    `what` is what messages call the model. A ConfigError says that it is not within reach.
    """
    if model.startswith(PREFIX):
        model = str(shipped_drafter(model.removeprefix(PREFIX)))
    folder = Path(os.path.expanduser(model))
    if model and os.path.isdir(folder):
        path = folder / name
        return path if path.is_file() else None
    if os.path.isfile(folder):
        raise ConfigError(f"{what} {model!r} is a file; give the checkpoint's folder")
    check_within_reach(model, what, revision)
    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except _LOAD_ERRORS as error:
        # "Not there" in the cache of a machine that cannot reach the hub says nothing.
        missing = isinstance(error, EntryNotFoundError)
        if missing and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise ConfigError(
            f"{what} {model!r}: no such folder, and not to be had from the hub: {one_line(error)}"
        ) from error


def read_config(model: str, revision: str | None = None, what: str = "drafter") -> dict[str, Any]:
    """A checkpoint's config.json; empty where it has none. The arguments are `resolve_file`'s."""
    path = resolve_file(model, CONFIG_FILE, revision, what)
    if path is None:
        return {}
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
