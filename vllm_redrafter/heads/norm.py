# SPDX-License-Identifier: Apache-2.0
"""The norm of the gated heads and of selectors: n(x) = sqrt(N) x / (|x| + EPSILON)."""

import torch
from torch import Tensor

EPSILON = 1e-6


def normed(x: Tensor) -> Tensor:
    """n(x): in fewer calls than `rms_norm`, which is many on a CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / ((norm + EPSILON) * x.shape[-1] ** -0.5)
