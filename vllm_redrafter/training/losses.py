"""What a row of training costs, and its gradient, in closed form: no graph over the vocabulary.

q [n, V] is what the drafter says, the softmax of its logits z; t [n, V] is what the teacher says.
That is the target's distribution *restricted* to the draft vocabulary: its sum m, what is covered,
may be below 1. The losses of a row:

    kl, ce, mix     sum_v t_v (log t_v - log q_v)
    lk              w KL + (1 - w) (m - alpha)        alpha = sum_v min(t_v, q_v)
    lk-alpha        -m log(alpha / m)
    acceptance      w KL + (1 - w) S (m - A)          A = sum_v t_v s_v

alpha is the probability that speculative sampling accepts a token drawn from q. A is the target's
mass on the drafter's k best tokens: the probability that a walk over a tree with these k children
goes on; s is a smooth "is among the k best" (`soft_top.py`). S is the probability that the walk
gets as far as this row (`Reach`).

w is exp(-decay alpha), and exp(-decay A). KL is m times that to t / m here, not below 0. It moves
the drafter where it is far off: alpha and A have no gradient at tokens that it deems impossible.
No gradient goes through w and S.

With m = 1 `lk` and `lk-alpha` are LK-lambda and LK-alpha of arXiv 2602.23881, except that w is a
row's own here, and there of the mean alpha of a batch. `acceptance` is this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_redrafter.training.soft_top import soft_top


class RowLoss(Protocol):
    def __call__(
        self, log_q: Tensor, taught: Tensor, start: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Losses and gradients of some rows.

        Args:
            log_q: [n, V], the logarithms of q; overwritten.
            taught: [n, V], t; at least 0, its sum at most 1.
            start: [n] int64, the position that each row starts from.
            step: [n] int64, from 1; the rows of one start come in ascending order.

        Returns:
            ([n] losses, [n, V] the derivative of each by its row's logits), dtype of log_q.
        """
        ...


def kullback_leibler(
    log_q: Tensor, taught: Tensor, start: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """`kl`, `ce` and `mix`: 0 or more where t is whole, m log m or more where it is restricted."""
    return _kl(log_q, taught)


def log_overlap(
    log_q: Tensor, taught: Tensor, start: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """`lk-alpha`: 0 where no token has less of q than of t."""
    log_t = taught.log()
    # In logarithms, since q of what alpha is made of may be too small for its dtype.
    smaller = torch.minimum(log_q, log_t)
    log_alpha = smaller.logsumexp(dim=-1, keepdim=True)
    covered = taught.sum(dim=-1, keepdim=True)
    nothing = covered == 0
    losses = (torch.xlogy(covered, covered) - covered * log_alpha).masked_fill(nothing, 0.0)
    # The share in alpha of each token that has less of q than of t.
    share = (smaller - log_alpha).exp_().masked_fill_((log_q >= log_t) | nothing, 0.0)
    gradient = log_q.exp_().mul_(share.sum(dim=-1, keepdim=True)).sub_(share).mul_(covered)
    return losses.squeeze(-1).clamp(min=0), gradient


@dataclass(frozen=True)
class BlendedOverlap:
    """`lk`: the more of the drafter is accepted, the less of KL and the more of m - alpha.

    Attributes:
        decay: KL's weight is exp(-decay alpha).
    """

    decay: float

    def __call__(
        self, log_q: Tensor, taught: Tensor, start: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = log_q.exp()
        alpha = torch.minimum(q, taught).sum(dim=-1)
        lacking = q.masked_fill(q >= taught, 0.0)
        gradient = q.mul_(lacking.sum(dim=-1, keepdim=True)).sub_(lacking)
        rejected = (taught.sum(dim=-1) - alpha).clamp(min=0)
        return _blended(log_q, taught, (-self.decay * alpha).exp(), rejected, gradient)


@dataclass(frozen=True)
class BlendedTopMass:
    """`acceptance`: the more of the target is among the k best, the less of KL.

    Attributes:
        decay: KL's weight is exp(-decay A).
        top: [L] int64, k of each step.
        temperature: of the boundary of the k best, in logits.
        reach: that of the batch.
    """

    decay: float
    top: Tensor
    temperature: float
    reach: Reach

    def __call__(
        self, log_q: Tensor, taught: Tensor, start: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        among = soft_top(log_q / self.temperature, self.top[step - 1])
        mass = (among * taught).sum(dim=-1)
        reached = self.reach(start, step, mass)
        missed = (taught.sum(dim=-1) - mass).clamp(min=0) * reached
        # They stay k: what one token gains is lost by those that are near the boundary.
        moves = among.mul_(1 - among)
        total = moves.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(moves.dtype).tiny)
        at_boundary = (moves * taught).sum(dim=-1, keepdim=True) / total
        gradient = moves.mul_(at_boundary - taught).mul_(reached.unsqueeze(1) / self.temperature)
        return _blended(log_q, taught, (-self.decay * mass).exp(), missed, gradient)


class Reach:
    """S: the probability that the walk gets as far as a row, the product of A before it.

    What the walk does not get to should not cost the drafter what little it can learn.

    Args:
        num_positions: starts are below this.
        num_steps: L.
        device: of the rows.
    """

    def __init__(self, num_positions: int, num_steps: int, device: torch.device) -> None:
        self.mass = torch.ones(num_positions, num_steps, dtype=torch.float64, device=device)
        self.index = torch.arange(num_steps, device=device)

    def __call__(self, start: Tensor, step: Tensor, mass: Tensor) -> Tensor:
        """[n], S of rows that have A `mass` [n]; those of earlier steps have been given before."""
        self.mass[start, step - 1] = mass.to(self.mass.dtype)
        before = self.index < step.unsqueeze(1) - 1
        return self.mass[start].where(before, 1.0).prod(dim=1).to(mass.dtype)


def _blended(
    log_q: Tensor, taught: Tensor, kl_share: Tensor, losses: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """kl_share [n] of m KL(t / m || q), the rest of another loss; its gradient is overwritten."""
    kl, kl_gradient = _kl(log_q, taught)
    covered = taught.sum(dim=-1)
    kl = (kl - torch.xlogy(covered, covered)).clamp(min=0)
    share = kl_share.unsqueeze(1)
    return torch.lerp(losses, kl, kl_share), gradient.mul_(1 - share).addcmul_(kl_gradient, share)


def _kl(log_q: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
    losses = (torch.xlogy(taught, taught) - taught * log_q).sum(dim=-1)
    covered = taught.sum(dim=-1, keepdim=True)
    return losses, log_q.exp_().mul_(covered).sub_(taught)
