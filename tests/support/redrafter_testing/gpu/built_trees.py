# SPDX-License-Identifier: Apache-2.0
"""Inputs of the kernels that build trees, and buffers that show what was written."""

import torch
from torch import Tensor

from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.triton_kernels.build_tree import TreeBuffers

SENTINEL = -77
FIELDS = ("tokens", "parents", "depths", "num_nodes", "ancestors")


def buffers(device: torch.device, max_requests: int, max_nodes: int) -> TreeBuffers:
    """Full of what no tree holds: all that a tree has must be written."""
    out = TreeBuffers(max_requests, max_nodes, device)
    for name in FIELDS:
        getattr(out, name).fill_(SENTINEL)
    return out


def roots(requests: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(requests, dtype=dtype) + 100


def on(device: torch.device, explored: ExploredNodes) -> list[Tensor]:
    tensors = (explored.tokens, explored.back_pointers, explored.log_probs)
    return [tensor.to(device) for tensor in tensors]


def random_search(requests: int, length: int, width: int, seed: int = 0) -> ExploredNodes:
    """Scores fall by a random multiple of 1/4 per level, which is exact and often ties."""
    generator = torch.Generator().manual_seed(seed)

    def randint(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator)

    scores, pointers = [-randint(8, requests, width) / 4], [torch.zeros(requests, width).long()]
    for _ in range(length - 1):
        pointers.append(randint(width, requests, width))
        scores.append(scores[-1].gather(1, pointers[-1]) - randint(8, requests, width) / 4)
    tokens = randint(50_000, requests, length, width)
    return ExploredNodes(tokens, torch.stack(pointers, 1), torch.stack(scores, 1))
