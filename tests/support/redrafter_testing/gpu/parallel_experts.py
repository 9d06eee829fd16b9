# SPDX-License-Identifier: Apache-2.0
"""Experts on several ranks, for which vLLM's CPU backend lacks some parts that GPUs have."""

from typing import Any

import torch
from torch import Tensor


def use() -> None:
    """Let this process's ranks have different experts, and gather each other's rows."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernel = cpu_moe.CPUUnquantizedExperts.apply

    def apply(experts: Any, **inputs: Any) -> None:
        expert_map: Tensor | None = inputs["expert_map"]
        if expert_map is not None:
            chosen: Tensor = inputs["topk_ids"]
            own = expert_map[chosen.long()].to(chosen.dtype)
            inputs["topk_weights"] = inputs["topk_weights"].masked_fill(own < 0, 0.0)
            inputs |= {"topk_ids": own.clamp(min=0), "expert_map": None}
        kernel(experts, **inputs)

    cpu_moe.CPUUnquantizedExperts.apply = apply
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    ranks: Any, inputs: list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> list[Tensor]:
    """All ranks' rows, of which each has its own number."""
    assert dim == 0 and sizes is not None
    gathered = []
    for rows in inputs:
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=ranks.device_group)
        gathered.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return gathered


def _reduce_scatterv(
    ranks: Any, rows: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """This rank's rows of the ranks' sum."""
    assert dim == 0 and sizes is not None
    summed = rows.clone()
    torch.distributed.all_reduce(summed, group=ranks.device_group)
    return summed.split(sizes)[ranks.rank_in_group]
