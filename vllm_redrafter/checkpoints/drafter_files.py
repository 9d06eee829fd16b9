# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's files are: in a folder, or in a repository of the Hugging Face hub."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from vllm_redrafter.checkpoints.shipped import PREFIX, shipped_drafter
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.hub import from_hub
from vllm_redrafter.utils.json_files import read_object

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"


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
    with from_hub(model, what, revision):
        try:
            return Path(hf_hub_download(model, name, revision=revision))
        except LocalEntryNotFoundError:
            raise  # "Not there" in the cache of a machine that cannot reach the hub says nothing.
        except EntryNotFoundError:
            return None


def read_config(model: str, revision: str | None = None, what: str = "drafter") -> dict[str, Any]:
    """A checkpoint's config.json; empty where it has none. The arguments are `resolve_file`'s."""
    path = resolve_file(model, CONFIG_FILE, revision, what)
    return {} if path is None else read_object(path)
