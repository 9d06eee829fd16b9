# SPDX-License-Identifier: Apache-2.0
"""What kernels compute, by torch in float64.

Import it after tests/triton_kernels/conftest.py, which has kernels interpreted.
"""

import torch
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.triton_kernels.top_candidates import TopTokens


def naive_top_candidates(logits: Tensor, num: int) -> TopTokens:
    """`top_candidates` by a stable sort, in float64."""
    in_order, tokens = logits.double().sort(dim=1, descending=True, stable=True)
    normalisers = in_order[:, :TOP_TOKENS].logsumexp(dim=1)
    pad = (0, max(0, num - logits.shape[1]))
    return TopTokens(
        torch.nn.functional.pad(in_order[:, :num], pad, value=-torch.inf).float(),
        torch.nn.functional.pad(tokens[:, :num], pad).int(),
        normalisers.masked_fill(normalisers == -torch.inf, 0.0).float(),
    )


def naive_normed(x: Tensor, epsilon: float) -> Tensor:
    """sqrt(K) x / (|x| + epsilon), of each row x [..., K]."""
    return x.shape[-1] ** 0.5 * x / (x.norm(dim=-1, keepdim=True) + epsilon)
