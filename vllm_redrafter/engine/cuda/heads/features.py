# SPDX-License-Identifier: Apache-2.0
"""What the vocabulary-wide layer reads, made where a form has left its norm to come."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_redrafter.heads.fused_head import Features
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.triton_kernels.gated_layer import scale_normed


def made(features: Features) -> Tensor:
    """[rows, E], as the layer reads them."""
    x, scale = features
    return x if scale is None else scale_normed(x, scale, torch.empty_like(x), EPSILON)
