# SPDX-License-Identifier: Apache-2.0
"""The vocabulary-wide layer and its loss in one, a chunk of rows at a time.

Logits of all rows, [L * B * T, V], would be the largest tensor of training by far. They never
exist: the forward pass computes a chunk's loss *and* its gradient (as Liger's fused linear
cross-entropy does), and frees the chunk:

    z = W f,   q = softmax(z),   loss = KL(t || q) = sum_v t_v (log t_v - log q_v)
    d z = (sum_v t_v) q - t,   d loss / d f = W^T d z,   d loss / d W = d z f^T

with t what is taught (`teachers.py`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vllm_redrafter.training.teachers import Teacher

CHUNK_ELEMENTS = 1 << 26
"""Elements of a chunk's logits: 256 MiB in float32."""
CPU_CHUNK_ELEMENTS = 1 << 22
"""The same on a CPU: 16 MiB, which its cache holds from one pass over them to the next."""


def head_loss(
    features: Tensor, weight: Tensor, row_weights: Tensor, teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the rows' losses.

    Args:
        features: [N, E], what the last layer reads.
        weight: [draft tokens, E], the last layer's.
        row_weights: [N].
        teacher: gives the rows' distributions.

    Returns:
        (scalar that backward starts from, [N] the rows' losses, detached).
    """
    device, dtype = features.device.type, features.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elements = CPU_CHUNK_ELEMENTS if device == "cpu" else CHUNK_ELEMENTS
    chunk = max(1, elements // weight.shape[0])
    given = features, weight, row_weights, teacher, dtype, chunk
    total, losses = _HeadLoss.apply(*given)  # type: ignore[no-untyped-call]
    return total, losses


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        row_weights: Tensor,
        teacher: Teacher,
        product_dtype: torch.dtype,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        loss_dtype = torch.promote_types(features.dtype, torch.float32)
        inputs, matrix = features.to(product_dtype), weight.to(product_dtype)
        needs_gradients, learns_weight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        if needs_gradients:
            grad_features = torch.empty_like(features)
            grad_weight = torch.zeros_like(weight) if learns_weight else None
        losses = torch.empty(len(features), dtype=loss_dtype, device=features.device)
        with torch.autocast(features.device.type, enabled=False):
            for first in range(0, len(features), chunk):
                rows = slice(first, first + chunk)
                log_q = (inputs[rows] @ matrix.T).to(loss_dtype).log_softmax(dim=-1)
                losses[rows], grad = _kullback_leibler(log_q, teacher(rows))
                if needs_gradients:
                    grad = grad.mul_(row_weights[rows, None]).to(product_dtype)
                    grad_features[rows] = (grad @ matrix).to(features.dtype)
                    if grad_weight is None:
                        continue
                    if product_dtype == weight.dtype:
                        grad_weight.addmm_(grad.T, inputs[rows])
                    else:
                        grad_weight += grad.T @ inputs[rows]
        if needs_gradients:
            ctx.save_for_backward(grad_features, grad_weight)
        ctx.mark_non_differentiable(losses)
        return (losses * row_weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Any, ...]:
        grad_features, grad_weight = ctx.saved_tensors
        # In place: a second gradient of W would be the largest tensor there is.
        if grad_weight is not None:
            grad_weight.mul_(grad_total)
        return grad_features.mul_(grad_total), grad_weight, None, None, None, None


def _kullback_leibler(log_q: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
    """([n] losses, [n, V] their derivatives by the logits) of [n, V] each; log_q is overwritten."""
    losses = (torch.xlogy(taught, taught) - taught * log_q).sum(dim=-1)
    covered = taught.sum(dim=-1, keepdim=True)
    return losses, log_q.exp_().mul_(covered).sub_(taught)
