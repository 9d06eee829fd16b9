"""vLLM's kernel for weights in fp8, by torch: on a CPU, where vLLM has none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel
from vllm.platforms.interface import PlatformEnum

from vllm_redrafter.engine.cuda import fp8_layer

multiplied: Counter[int] = Counter()
"""How often, by the number of outputs."""


class TorchWeightOnly(FP8ScaledMMLinearKernel):
    """Multiplies with what the weights are in fp8; their order stays as it is."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return True, None

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        assert layer.weight.dtype == torch.float8_e4m3fn
        multiplied[layer.output_size_per_partition] += 1
        return (x @ layer.weight.to(x.dtype)) * layer.weight_scale.to(x.dtype).view(-1)

    def apply_scaled_mm(self, **_: Any) -> torch.Tensor:
        raise NotImplementedError


def use() -> None:
    """From here on in this process."""
    linear._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU] = [TorchWeightOnly]
    fp8_layer.DTYPES = (*fp8_layer.DTYPES, torch.float32)


def how_often(worker: Any) -> dict[int, int]:
    """For `Engine.rpc`: products so far, by the number of outputs."""
    return dict(multiplied)


def weights(worker: Any) -> tuple[int, torch.Tensor]:
    """For `Engine.rpc`: where the layer's weights lie, and a copy of them in float32."""
    weight = worker.model_runner.speculator.drafter.vocabulary_layers[0].packed.weight
    return weight.data_ptr(), weight.float()
