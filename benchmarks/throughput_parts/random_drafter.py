"""A drafter that knows nothing: what it costs is what the adaptive method must save."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from vllm_redrafter import save_drafter
from vllm_redrafter.checkpoints.reading import load_drafter


def write_random_drafter(model: str, folder: Path, seed: int) -> None:
    """Write a checkpoint with the sizes and the draft vocabulary of another, and random weights.

    Args:
        model: the checkpoint whose sizes it takes: a folder or a hub id.
        folder: where to write.
        seed: of the weights.

    Raises:
        vllm_redrafter.ConfigError: see `load_drafter`.
    """
    drafter = load_drafter(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    save_drafter(drafter, folder)
