# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads of random weights, in all forms that checkpoints have."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_redrafter.heads.medusa import MedusaConfig, MedusaHead

V, H, HEADS = 60, 16, 3
KEPT = torch.arange(40) + 11

SIZES: dict[str, dict[str, Any]] = {
    "as published": {"bias": True},
    "as in the paper": {},
    "two blocks": {"num_draft_layers": 2, "bias": True},
    "no block": {"num_draft_layers": 0},
    "one output": {"shared_output": True},
    "40 draft tokens": {"draft_vocab_size": len(KEPT)},
}
VLLM = {
    "model_type": "medusa",
    "architectures": ["MedusaModel"],
    "hidden_size": H,
    "vocab_size": V,
    "num_heads": HEADS,
    "num_hidden_layers": 1,
    "truncated_vocab_size": V,
}
"""As vLLM's checkpoints say it."""


def medusa(**sizes: Any) -> MedusaHead:
    torch.manual_seed(0)
    head = MedusaHead(MedusaConfig(V, H, num_heads=HEADS, **sizes)).eval().requires_grad_(False)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.5)
    if head.config.draft_vocab_size is not None:
        head.keep_tokens(KEPT)
    return head


def write(folder: Path, config: dict[str, Any], name: str, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint: config.json, and the tensors in a file of this name."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: t.clone() for key, t in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder
