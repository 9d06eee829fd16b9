# SPDX-License-Identifier: Apache-2.0
"""Writing a drafter's checkpoint: a folder with config.json and model.safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vllm_redrafter.checkpoints.drafter_files import CONFIG_FILE, WEIGHTS_FILE
from vllm_redrafter.checkpoints.reading import proposal_of
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.utils.names import METHOD


def save_drafter(
    drafter: DraftHead,
    folder: str | Path,
    verifier: str | None = None,
    shape: Mapping[str, Any] | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint folder.

    Args:
        drafter: what to write.
        folder: made if it does not exist.
        verifier: the target's name or path, recorded under `speculators_config`.
        shape: how it is to be served where nothing else is said, recorded there as well; see
            `shape_of`.
        extra: further entries of config.json, such as training settings.
    """
    recorded: dict[str, Any] = {"algorithm": METHOD, "verifier": {"name_or_path": verifier}}
    if shape:
        recorded |= {"default_proposal_method": METHOD}
        recorded |= {
            "proposal_methods": [{"proposal_type": METHOD, **proposal_of(shape, drafter.config)}]
        }
    further = {"speculators_config": recorded, **extra}
    write_files(drafter, Path(folder), "own", further)


def write_files(drafter: DraftHead, folder: Path, layout: str, further: Mapping[str, Any]) -> None:
    """Write config.json and model.safetensors.

    Args:
        drafter: what to write.
        folder: made if it does not exist.
        layout: "own", or one of the head's `layouts`.
        further: entries of config.json besides the sizes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous().cpu() for name, t in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "model_type": drafter.config.model_type,
        "architectures": [drafter.layouts.get(layout, type(drafter).__name__)],
        **{k: v for k, v in asdict(drafter.config).items() if v not in (None, ())},
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
        **further,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    # safetensors lets nobody else read what it writes, such as the user that a server runs as.
    shutil.copymode(folder / CONFIG_FILE, folder / WEIGHTS_FILE)
