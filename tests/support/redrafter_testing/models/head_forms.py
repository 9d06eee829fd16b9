# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of every form that the recurrent and the gated head have."""

from pathlib import Path

import torch
from torch import nn

from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.heads.registry import build_head

V, H = 300, 20

FORMS: dict[str, HeadConfig] = {
    "recurrent": RecurrentConfig(V, H, exit_dim=2 * H),
    "recurrent, two blocks": RecurrentConfig(V, H, exit_dim=2 * H, num_draft_layers=2),
    "recurrent, input_proj": RecurrentConfig(V, H, exit_dim=24),
    "recurrent, input_proj, no block": RecurrentConfig(V, H, exit_dim=24, num_draft_layers=0),
    "sum of embeddings": RecurrentConfig(V, H, exit_dim=2 * H, num_draft_layers=0, rnn=False),
    "sum of embeddings, input_proj": RecurrentConfig(V, H, exit_dim=24, rnn=False),
    "recurrent, draft vocabulary": RecurrentConfig(V, H, exit_dim=2 * H, draft_vocab_size=130),
    "recurrent, three layers": RecurrentConfig(V, H, exit_dim=24, target_layers=(1, 2, 5)),
    "gated": GatedConfig(V, H),
    "gated, one block": GatedConfig(V, H, num_draft_layers=1),
    "gated, two blocks": GatedConfig(V, H, num_draft_layers=2),
    "gated, draft vocabulary": GatedConfig(V, H, draft_vocab_size=130),
    "gated, all of that": GatedConfig(
        V, H, num_draft_layers=1, draft_vocab_size=130, target_layers=(1, 2, 5)
    ),
    "recurrent, fewer tokens than beams": RecurrentConfig(3, H, exit_dim=24),
}
"""By what they are. V is no multiple of a group of tokens, nor is the draft vocabulary."""


def random_head(config: HeadConfig, dtype: torch.dtype = torch.float32) -> DraftHead:
    """A head whose beams outlive and leave one another."""
    torch.manual_seed(0)
    head = build_head(config).to(dtype).eval().requires_grad_(False)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    if config.draft_vocab_size is not None:
        head.keep_tokens(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return head


def write_random(config: HeadConfig, folder: Path, dtype: torch.dtype = torch.float32) -> DraftHead:
    """Write a random head's checkpoint; returns the head."""
    head = random_head(config, dtype)
    save_drafter(head, folder)
    return head
