# SPDX-License-Identifier: Apache-2.0
"""Writing a drafter's checkpoint, or the shape that it is served in (`evaluate --record`)."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling, acceptance_entry
from vllm_redrafter.checkpoints.drafter_files import CONFIG_FILE, WEIGHTS_FILE, read_config
from vllm_redrafter.checkpoints.reading import SHAPE_KEYS, Checkpoint
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import whole_file, writing
from vllm_redrafter.utils.names import METHOD

ENTRY = "speculators_config"
COPY = "evaluate a copy of the checkpoint that you may write to, or leave --record out"


def save_drafter(
    drafter: DraftHead,
    folder: str | Path,
    verifier: str | None = None,
    shape: Mapping[str, Any] | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint folder, which is made if it does not exist.

    Args:
        verifier: the target's name or path, recorded under `speculators_config`.
        shape: the default shape for serving, recorded there as well; see `shape_of`.
        extra: further entries of config.json, such as training settings.
    """
    recorded: dict[str, Any] = {"algorithm": METHOD, "verifier": {"name_or_path": verifier}}
    if shape:
        method = {"proposal_type": METHOD, **_proposal(shape, drafter.config)}
        recorded |= {"default_proposal_method": METHOD, "proposal_methods": [method]}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Copies: safetensors refuses tensors that share memory, as a pickle's may.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in drafter.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "model_type": drafter.config.model_type,
        "architectures": [type(drafter).__name__.replace("Head", "Drafter")],
        **{k: v for k, v in asdict(drafter.config).items() if v not in (None, ())},
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
        ENTRY: recorded,
        **extra,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    # safetensors makes its files readable by their owner alone; a server may run as another user.
    shutil.copymode(folder / CONFIG_FILE, folder / WEIGHTS_FILE)


def check_recordable(model: str) -> Path:
    """A checkpoint's config.json, if a shape can be recorded there; asked before the evaluation."""
    folder = Path(os.path.expanduser(model))
    if not folder.is_dir():
        raise ConfigError(
            f"--record: {model!r} is not a folder, and repositories of the hub are not written "
            "to: download the checkpoint and evaluate its folder, or leave --record out"
        )
    path = folder / CONFIG_FILE
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
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--record: {path} cannot be written: the folder is read-only; {COPY}")
    return path


def save_shape(
    model: str, shape: ReDrafterConfig, acceptance: PerSampling = NOTHING_RECORDED
) -> Path:
    """Record a shape, and the acceptance if measured, in a checkpoint folder's config.json.

    The first proposal method gets K, beam width and length, and the candidates of a head with a
    selector. All other entries stay, and at no time is the file half written.
    """
    path = check_recordable(model)
    config = read_config(model)
    recorded = config[ENTRY]
    first, *others = recorded.get("proposal_methods") or [{"proposal_type": METHOD}]
    recorded.setdefault("default_proposal_method", first.get("proposal_type", METHOD))
    proposal = _proposal(asdict(shape), Checkpoint.of(model, None, config).head)
    recorded["proposal_methods"] = [first | proposal, *others]
    config |= acceptance_entry(acceptance)
    with writing(f"--record: {path}", COPY), whole_file(path) as file:
        os.fchmod(file.fileno(), path.stat().st_mode)
        file.write((json.dumps(config, indent=2) + "\n").encode())
    return path


def _proposal(shape: Mapping[str, Any], head: HeadConfig) -> dict[str, Any]:
    """Entries of a proposal method, with candidates if the head selects some; see `shape_of`."""
    entries = {theirs: shape[ours] for ours, theirs in SHAPE_KEYS.items() if ours in shape}
    if not head.selected_depths:
        entries.pop("candidates", None)
    return entries
