# SPDX-License-Identifier: Apache-2.0
"""Targets and drafters that the user gives, instead of those that the demo has by itself."""

from __future__ import annotations

from pathlib import Path

from vllm_redrafter.checkpoints.fit import misfits_of
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError


def target_folder(target: Path, otherwise: str) -> Path:
    """The folder of `--target`, absolute.

    Args:
        target: as the user gave it.
        otherwise: what is used where `--target` is left out.

    Raises:
        ConfigError: it is no model's folder.
    """
    folder = target.expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--target {str(folder)!r}: no config.json there; give the folder of a model in "
            f"Hugging Face format, or leave --target out for {otherwise}"
        )
    return folder


def check_sizes(target: str | Path, drafter: str | Path, name: str, remedy: str) -> None:
    """Refuse a drafter of another target.

    Args:
        target, drafter: folders or hub ids.
        name: of the drafter, in a message.
        remedy: what the user can do about it.

    Raises:
        ConfigError: it does not fit.
    """
    head = Checkpoint.open(str(drafter)).head
    if reasons := misfits_of(head, Target.open(target).config):
        raise ConfigError(
            f"{name} does not fit the target {str(target)!r}: {'; '.join(reasons)}: {remedy}"
        )
