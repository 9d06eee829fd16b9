# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter evaluate --record`: a checkpoint is told in which shape it is served best."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from vllm_redrafter.checkpoints.acceptance import (
    NOTHING_RECORDED,
    PerSampling,
    acceptance_entry,
)
from vllm_redrafter.checkpoints.drafter_files import CONFIG_FILE, read_config
from vllm_redrafter.checkpoints.reading import Checkpoint, proposal_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import whole_file
from vllm_redrafter.utils.names import METHOD

ENTRY = "speculators_config"


def check_recordable(model: str) -> Path:
    """Can a shape be recorded there? To be asked before the work that finds the shape.

    Args:
        model: a checkpoint, as the user named it.

    Returns:
        Its config.json.

    Raises:
        ConfigError: it is no folder, cannot be written to, or has no place for a shape.
    """
    folder = Path(os.path.expanduser(model))
    if not folder.is_dir():
        raise ConfigError(
            f"--record: {model!r} is not a folder, and repositories of the hub are not written "
            "to: download the checkpoint and evaluate its folder, or leave --record out"
        )
    path = folder / CONFIG_FILE
    _check_entry(model, path)
    if not os.access(folder, os.W_OK):
        raise _not_writable(path, "the folder is read-only")
    return path


def save_shape(
    model: str, shape: ReDrafterConfig, acceptance: PerSampling = NOTHING_RECORDED
) -> Path:
    """Make a shape the one that a checkpoint is served in where nothing else is said (`shape_of`).

    The first proposal method in config.json gets the shape; where there is none, it is added. All
    other entries stay, and at no time is the file half written.

    Args:
        model: the checkpoint's folder.
        shape: K, beam width and length, and the candidates of a head that tells some; its other
            settings are not recorded.
        acceptance: how its nodes are accepted, recorded too where it was measured.

    Returns:
        The config.json that was written.

    Raises:
        ConfigError: see `check_recordable`.
    """
    path = check_recordable(model)
    try:
        config = read_config(model)
        recorded = config[ENTRY]
        first, *others = recorded.get("proposal_methods") or [{"proposal_type": METHOD}]
        recorded.setdefault("default_proposal_method", first.get("proposal_type", METHOD))
        recorded["proposal_methods"] = [
            first | proposal_of(asdict(shape), Checkpoint.of(model, None, config).head),
            *others,
        ]
        config |= acceptance_entry(acceptance)
        with whole_file(path) as file:
            os.fchmod(file.fileno(), path.stat().st_mode)
            file.write((json.dumps(config, indent=2) + "\n").encode())
    except OSError as error:
        raise _not_writable(path, str(error)) from error
    return path


def _check_entry(model: str, path: Path) -> None:
    recorded = read_config(model).get(ENTRY)
    if not isinstance(recorded, dict):
        raise ConfigError(
            f"--record: {path} has no {ENTRY}, where a shape is recorded (Apple's format has no "
            f"place for one): run `vllm-redrafter convert {model} FOLDER` first, and evaluate "
            "FOLDER"
        )
    methods = recorded.get("proposal_methods") or []
    if not (isinstance(methods, list) and all(isinstance(method, dict) for method in methods)):
        raise ConfigError(
            f"--record: {path}: proposal_methods in {ENTRY} must be a list of objects, got "
            f"{methods!r}: delete that entry"
        )


def _not_writable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"--record: {path} cannot be written: {reason}; evaluate a copy of the checkpoint that "
        "you may write to, or leave --record out"
    )
