# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub, asked once before its library asks again and again for half a minute."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_redrafter.utils.errors import ConfigError, one_line


@contextmanager
def from_hub(name: str, what: str, revision: str | None = None) -> Iterator[None]:
    """Raise a ConfigError where the body cannot get a model's files; see `check_within_reach`."""
    check_within_reach(name, what, revision)
    try:
        yield
    except (OSError, ValueError) as error:  # those of its library are such
        raise ConfigError(
            f"{what} {name!r}: no such folder, and not to be had from the hub: {one_line(error)}"
        ) from error


def check_within_reach(name: str, what: str, revision: str | None = None) -> None:
    """Refuse a model that is neither here nor at the hub; `what` it is begins the message."""
    if name and Path(os.path.expanduser(name)).exists():
        return
    missing = f"{what} {name!r}: no such folder"
    if not name or name.startswith((".", "/", "~")):
        raise ConfigError(f"{missing}; give a model's folder or a hub id")
    from huggingface_hub import constants, model_info
    from huggingface_hub.file_download import repo_folder_name

    try:
        cached = repo_folder_name(repo_id=name, repo_type="model")
        if Path(constants.HF_HUB_CACHE, cached).is_dir():
            return
        model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # whatever it is, and that of its HTTP client
        raise ConfigError(
            f"{missing}, and not to be had from the hub: {one_line(error)}"
        ) from error
