# SPDX-License-Identifier: Apache-2.0
"""What kernels compute, by torch in float64.

Import it after tests/triton_kernels/conftest.py, which has kernels interpreted.
"""

import torch
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.triton_kernels.draft_layers import Product
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


def naive_draft_layer(
    first: Product,
    rows: int,
    second: Product | None = None,
    bias: Tensor | None = None,
    addend: Tensor | None = None,
    silu: bool = False,
    residual: Tensor | None = None,
    epsilon: float | None = None,
) -> Tensor:
    """`draft_layer` by torch, in float64: [rows, N] float64."""

    def rows_of(product: Product) -> Tensor:
        x, chosen = product.x, product.rows
        return (x[:rows] if chosen is None else x[chosen.long()]).double()

    x = rows_of(first) if epsilon is None else naive_normed(rows_of(first), epsilon)
    total = x @ first.weight.double().t()
    if second is not None:
        total = total + rows_of(second) @ second.weight.double().t()
    if bias is not None:
        total = total + bias.double()
    if addend is not None:
        total = total + addend.double().repeat_interleave(rows // addend.shape[0], dim=0)
    if silu:
        total = torch.nn.functional.silu(total)
    return total if residual is None else total + residual.double()


def naive_normed(x: Tensor, epsilon: float) -> Tensor:
    """sqrt(K) x / (|x| + epsilon), of each row x [..., K]."""
    return x.shape[-1] ** 0.5 * x / (x.norm(dim=-1, keepdim=True) + epsilon)
