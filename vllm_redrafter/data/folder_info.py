# SPDX-License-Identifier: Apache-2.0
"""The file that says what a folder's shards are: `dataset.json`, `states.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import write_once
from vllm_redrafter.utils.json_files import read_json


class FolderInfo(Protocol):
    """A dataclass that describes a folder, in a file of its own."""

    def save(self, folder: Path) -> None:
        """Write the file, unless there is one."""

    @classmethod
    def load(cls, folder: Path) -> Any:
        """Read the file."""


def begin(output: Path, info: FolderInfo) -> None:
    """Describe a new folder, or find it described so; several processes may do so at once.

    Raises:
        ConfigError: the folder holds something else, or another target's. The same target by
            another name is none.
    """
    info.save(output)
    found, own = _flat(type(info).load(output)), _flat(info)
    check_same(output, found, own)


def check_same(output: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse to continue what was made with other settings; the target's name is none.

    Args:
        output: a folder or a file.
        found: what it was made with.
        own: what it would be continued with.

    Raises:
        ConfigError: they differ.
    """
    different = [name for name in own if name != "target" and own[name] != found.get(name)]
    if different:
        each = [f"{name}: {found.get(name)!r}, not {own[name]!r}" for name in different]
        raise ConfigError(
            f"--output {output} was made with other settings, which cannot be continued with "
            f"these: {'; '.join(each)}. Give the former settings or another --output"
        )


def save_info(file: Path, info: Any) -> None:
    """Write a dataclass's fields, unless the file is there."""
    write_once(file, (json.dumps(asdict(info), indent=2) + "\n").encode())


def read_info(file: Path, version: int, command: str) -> dict[str, Any]:
    """The fields.

    Args:
        file: the description.
        version: of the format, as `format_version` has to have it.
        command: what writes such folders.

    Raises:
        ConfigError: it is missing, no JSON, or of another format version.
    """
    try:
        values = read_json(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file.parent}: no {file.name} there; give a folder that {command} wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not readable as JSON: {error}") from error
    found = values.get("format_version") if isinstance(values, dict) else None
    if found != version:
        raise ConfigError(
            f"{file}: format version {found!r}, this version of vllm-redrafter reads {version}: "
            f"start {command} again with another folder, or use the version that wrote it"
        )
    return dict(values)


def _flat(info: Any) -> dict[str, Any]:
    """All fields, and those of fields that have some."""
    values: dict[str, Any] = {}
    for name, value in asdict(info).items():
        values.update(value if isinstance(value, dict) else {name: value})
    return values
