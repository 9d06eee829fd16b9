# SPDX-License-Identifier: Apache-2.0
"""Drafters of every form, a few numbers each, and ways to damage a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_redrafter.heads.recurrent import RecurrentConfig

PROJECTED = RecurrentConfig(11, 4, exit_dim=6, num_draft_layers=2, rnn=True)
PLAIN = RecurrentConfig(11, 4, exit_dim=8, num_draft_layers=1, rnn=False)
BARE = RecurrentConfig(11, 4, exit_dim=8, num_draft_layers=0, rnn=True, num_lookback_tokens=3)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    # Cloned: the file's memory is mapped, and the file is about to be overwritten.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


def plural_name(name: str) -> str:
    """A tensor's name in checkpoints of TensorRT-LLM."""
    return name.replace("input_proj.", "input_projs.").replace("lm_head.", "lm_heads.")


def numbered_name(name: str) -> str:
    """Another of TensorRT-LLM's, where the head is all there is."""
    return name.replace("lm_head.", "0.")
