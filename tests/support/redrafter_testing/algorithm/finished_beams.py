# SPDX-License-Identifier: Apache-2.0
"""The beams that a search finished, along their back-pointers."""

import torch
from torch import Tensor

from vllm_redrafter.tree.beam_search import ExploredNodes


def finished_beams(explored: ExploredNodes) -> tuple[Tensor, Tensor]:
    """[R, W, L] tokens, and [R, W, L] cumulative log-probabilities."""
    requests, length, width = explored.tokens.shape
    beam = torch.arange(width).expand(requests, -1)
    tokens, log_probs = [], []
    for level in reversed(range(length)):
        tokens.append(explored.tokens[:, level].gather(1, beam))
        log_probs.append(explored.log_probs[:, level].gather(1, beam))
        beam = explored.back_pointers[:, level].gather(1, beam)
    return torch.stack(tokens[::-1], dim=2), torch.stack(log_probs[::-1], dim=2)
