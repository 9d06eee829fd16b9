"""A smooth "is among the k best", which sums to k."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 8
"""After these the sum was k to within 0.05 % for normal scores of standard deviations 0 to 30."""


def soft_top(scores: Tensor, num: Tensor) -> Tensor:
    """How much each token is among the best.

    s_v = sigmoid(score_v - theta), with theta such that the s_v sum to k. Of all s between 0 and 1
    that sum to k it is the one with the highest sum_v s_v score_v + entropy (arXiv 1906.08707, and
    there theta is found by bisection); large scores make it the indicator of the k best.

    Its derivative follows from the sum being constant: with u_v = s_v (1 - s_v),
    d s_v = u_v (d score_v - sum_w u_w d score_w / sum_w u_w).

    Args:
        scores: [n, V].
        num: [n] int64, k, which is at least 1 and below V.

    Returns:
        [n, V], in the dtype of `scores`.
    """
    among = torch.empty_like(scores)  # in place from here on: new memory costs more than sums
    low, high = _bracket(scores, num, among)
    wanted = num.to(scores.dtype)
    theta = high
    for _ in range(ITERATIONS):
        torch.sub(scores, theta.unsqueeze(1), out=among).sigmoid_()
        total = among.sum(dim=-1)
        slope = total - torch.linalg.vecdot(among, among)
        low, high = low.where(total < wanted, theta), high.where(total > wanted, theta)
        # Newton's step on log(total), which is a straight line where few are near the boundary.
        step = (total / wanted).log() * total / slope.clamp(min=torch.finfo(scores.dtype).tiny)
        theta = theta + step
        theta = theta.where((theta >= low) & (theta <= high), (low + high) / 2)
    return torch.sub(scores, theta.unsqueeze(1), out=among).sigmoid_()


def _bracket(scores: Tensor, num: Tensor, space: Tensor) -> tuple[Tensor, Tensor]:
    """([n], [n]): theta is between these; `space`, [n, V], is overwritten."""
    wanted = num.to(scores.dtype).log()
    best = scores.topk(int(num.max()) + 1, dim=-1).values
    last = best.gather(1, num.unsqueeze(1) - 1)
    # At the lower end k + 1 tokens are k / (k + 1) among the best, or more.
    low = best.gather(1, num.unsqueeze(1)).squeeze(1) - wanted
    # A sigmoid is below 1, and below the exponential: at the upper end the sum is k at most, be
    # it by the latter for all tokens or by the former for k - 1 and the latter for the others.
    nothing = scores.new_tensor(-torch.inf)
    others = torch.where(scores > last, nothing, scores, out=space).logsumexp(dim=-1)
    return low, torch.minimum(scores.logsumexp(dim=-1) - wanted, others)
