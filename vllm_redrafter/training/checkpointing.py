# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run. Each is written whole, and the run can go on from it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vllm_redrafter.checkpoints.drafter_files import WEIGHTS_FILE
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.utils.errors import ConfigError, TrainingError
from vllm_redrafter.utils.files import whole_folder
from vllm_redrafter.utils.json_files import read_json

OPTIMIZER_FILE = "optimizer.pt"
PROGRESS_FILE = "progress.json"
KEPT = 2
"""Checkpoints that are kept: the last, and the one before it in case the last is damaged."""

_DAMAGED = (OSError, ValueError, TypeError, KeyError)


@dataclass(frozen=True)
class RunProgress:
    """Where a run stands: optimizer steps, smoothed loss, and all that its weights depend on."""

    step: int
    loss: float
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, in `OUTPUT/checkpoints/step-00000500` and so on."""

    def __init__(self, output: Path) -> None:
        self.folder = output / "checkpoints"

    def paths(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(self.folder.glob("step-[0-9]*"))

    def save(self, drafter: DraftHead, optimizer: dict[str, Any], progress: RunProgress) -> Path:
        """Write one, and delete the oldest; TrainingError where that fails (a full disk, say)."""
        path = self._path(progress.step)
        for half in self.folder.glob(".step-*"):
            shutil.rmtree(half, ignore_errors=True)  # of a run that was killed
        try:
            with whole_folder(path) as folder:
                save_drafter(drafter, folder)
                torch.save(optimizer, folder / OPTIMIZER_FILE)
                (folder / PROGRESS_FILE).write_text(json.dumps(vars(progress), indent=2) + "\n")
                shutil.rmtree(path, ignore_errors=True)
        # torch.save turns a failed write into a RuntimeError, safetensors into its own.
        except (OSError, RuntimeError, SafetensorError) as error:
            whole = self.paths()
            left = f"{whole[-1]} is the last whole one" if whole else "there is none before it"
            raise TrainingError(
                f"checkpoint {path} could not be written: {error}; {left}; make room and go on "
                "with --resume"
            ) from error
        for old in self.paths()[:-KEPT]:
            shutil.rmtree(old)
        return path

    def load(self, drafter: DraftHead, optimizer: torch.optim.Optimizer) -> RunProgress:
        """Read the newest into a drafter and its optimizer; ConfigError as in `newest`."""
        progress = self.newest()
        path = self.paths()[-1]
        try:
            drafter.load_state_dict(load_file(path / WEIGHTS_FILE))
            optimizer.load_state_dict(torch.load(path / OPTIMIZER_FILE, weights_only=True))
        except (*_DAMAGED, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
            raise _damaged(path) from error
        return progress

    def newest(self, record: dict[str, Any] | None = None) -> RunProgress:
        """The newest one's progress; ConfigError if missing, damaged, or of another `record`."""
        if not (paths := self.paths()):
            raise ConfigError(f"{self.folder}: no checkpoint to resume from; leave --resume out")
        try:
            found = RunProgress(**read_json(paths[-1] / PROGRESS_FILE))
            is_whole = isinstance(found.loss, int | float) and isinstance(found.record, dict)
            if not is_whole or self._path(found.step) != paths[-1]:
                raise ValueError("not what was written")
        except _DAMAGED as error:
            raise _damaged(paths[-1]) from error
        if record is not None and found.record != record:
            differing = ", ".join(
                f"{key}: {record.get(key)!r}, not {found.record.get(key)!r}"
                for key in {**record, **found.record}
                if record.get(key) != found.record.get(key)
            )
            raise ConfigError(
                f"{self.folder} cannot be resumed with other settings or data "
                f"({differing}): use those, or another output folder"
            )
        return found

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def _damaged(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: damaged, or not what train writes; delete it to go on from the checkpoint before "
        "it, or leave --resume out"
    )
