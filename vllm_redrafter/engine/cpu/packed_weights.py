# SPDX-License-Identifier: Apache-2.0
"""Products on weights that oneDNN packed once, as those of vLLM's own layers on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_redrafter.heads.head import Product


def packed(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The product x [..., in] -> x W^T + b [..., out], of copies of W [out, in] and b [out]."""
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(
        weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False
    )
    layer.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
    # vLLM says so itself where it cannot pack this dtype on this processor, and falls back.
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return lambda x: layer.cpu_linear(x, layer.weight, layer.bias)
