# SPDX-License-Identifier: Apache-2.0
"""Drafters that come with the package."""

from importlib.resources import files
from pathlib import Path

from vllm_redrafter.utils.errors import ConfigError

PREFIX = "redrafter:"
"""Begins a name such as redrafter:smollm2-135m-instruct, which stands wherever a folder may."""


def shipped_drafters() -> list[str]:
    """The names of all of them, in alphabetical order."""
    return sorted(folder.name for folder in _all().iterdir() if folder.is_dir())


def shipped_drafter(name: str) -> Path:
    """The folder of one."""
    if name not in shipped_drafters():
        raise ConfigError(
            f"no drafter {name!r} comes with this package; those that do: "
            f"{', '.join(shipped_drafters())}"
        )
    return _all() / name


def _all() -> Path:
    # A path: wheels are installed unpacked, and vLLM could not read a drafter inside an archive.
    return Path(str(files("vllm_redrafter.checkpoints"))) / "drafters"
