"""Each loss against autograd of its plain formula, and what the formulas promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_redrafter.training.losses import (
    BlendedOverlap,
    BlendedTopMass,
    Reach,
    RowLoss,
    kullback_leibler,
    log_overlap,
)
from vllm_redrafter.training.soft_top import soft_top

DECAY, TEMPERATURE = 3.0, 0.5
KINDS = ["kl", "lk", "lk-alpha", "acceptance"]
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}


def row_loss(kind: str, num_rows: int, top: tuple[int, ...] = (2, 1, 3)) -> RowLoss:
    device = torch.device("cpu")
    if kind == "acceptance":
        reach = Reach(num_rows, len(top), device)
        return BlendedTopMass(DECAY, torch.tensor(top), TEMPERATURE, reach)
    others: dict[str, RowLoss] = {
        "kl": kullback_leibler,
        "lk": BlendedOverlap(DECAY),
        "lk-alpha": log_overlap,
    }
    return others[kind]


def distributions(num: int, size: int, seed: int, covered: float, spread: float = 2.0) -> Tensor:
    """[num, size], each of which sums to `covered`."""
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(num, size, generator=generator, dtype=torch.float64)
    return covered * scores.softmax(dim=-1)


def logits_of(num: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num, size, generator=generator, dtype=torch.float64)


def separate_rows(num: int) -> tuple[Tensor, Tensor]:
    """(start, step): every row is the first of its start."""
    return torch.arange(num), torch.ones(num, dtype=torch.int64)


def overlap(q: Tensor, t: Tensor) -> Tensor:
    return torch.minimum(q, t).sum(dim=-1)


def kl_to_covered(logits: Tensor, t: Tensor) -> Tensor:
    m = t.sum(dim=-1, keepdim=True)
    p = t / m
    return (m * (torch.xlogy(p, p) - p * logits.log_softmax(dim=-1))).sum(dim=-1)


def exact_soft_top(scores: Tensor, num: Tensor) -> Tensor:
    """By bisection, and then one step of Newton that autograd differentiates."""
    low, high = scores.detach().amin(dim=-1) - 50, scores.detach().amax(dim=-1) + 50
    for _ in range(100):
        middle = (low + high) / 2
        more = torch.sigmoid(scores.detach() - middle.unsqueeze(1)).sum(dim=-1) >= num
        low, high = middle.where(more, low), high.where(more, middle)
    among = torch.sigmoid(scores - low.unsqueeze(1))
    slope = (among * (1 - among)).sum(dim=-1).detach()
    return torch.sigmoid(scores - (low + (among.sum(dim=-1) - num) / slope).unsqueeze(1))


def plain(kind: str, logits: Tensor, t: Tensor, num: Tensor, reached: Tensor) -> Tensor:
    """[n] losses as the formulas have them; the weights are constants."""
    q, m = logits.softmax(dim=-1), t.sum(dim=-1)
    if kind == "kl":
        return (torch.xlogy(t, t) - t * logits.log_softmax(dim=-1)).sum(dim=-1)
    if kind == "lk-alpha":
        return -m * (overlap(q, t) / m).log()
    if kind == "lk":
        accepted, factor = overlap(q, t), torch.ones_like(m)
    else:
        accepted = (t * exact_soft_top(logits / TEMPERATURE, num)).sum(dim=-1)
        factor = reached
    share = (-DECAY * accepted).exp().detach()
    return share * kl_to_covered(logits, t) + (1 - share) * factor * (m - accepted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("covered", [1.0, 0.6])
def test_loss_and_gradient_are_those_of_the_formula(kind: str, covered: float) -> None:
    logits, t = logits_of(6, 9, seed=1), distributions(6, 9, 2, covered)
    start, step = torch.tensor([0, 1, 0, 1, 0, 2]), torch.tensor([1, 1, 2, 2, 3, 1])
    num = torch.tensor([2, 1, 3])[step - 1]
    mass = (t * exact_soft_top(logits / TEMPERATURE, num)).sum(dim=-1)
    one = mass.new_ones(())
    reached = torch.stack([one, one, mass[0], mass[1], mass[0] * mass[2], one])

    wanted_logits = logits.clone().requires_grad_()
    wanted = plain(kind, wanted_logits, t, num, reached)
    wanted.sum().backward()
    losses, gradient = row_loss(kind, 6)(logits.log_softmax(dim=-1), t, start, step)

    torch.testing.assert_close(losses, wanted.detach(), **CLOSE)
    torch.testing.assert_close(gradient, wanted_logits.grad, **CLOSE)
    # A softmax does not change when all logits do.
    torch.testing.assert_close(gradient.sum(dim=-1), gradient.new_zeros(6), **CLOSE)


def test_kl_is_to_the_bit_what_it_was() -> None:
    logits, t = logits_of(5, 11, 3).float(), distributions(5, 11, 4, 0.7).float()
    log_q = logits.log_softmax(dim=-1)
    losses = (torch.xlogy(t, t) - t * log_q).sum(dim=-1)
    gradient = log_q.exp().mul_(t.sum(dim=-1, keepdim=True)).sub_(t)
    found = kullback_leibler(log_q, t, *separate_rows(5))
    assert torch.equal(found[0], losses) and torch.equal(found[1], gradient)


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(5, 40),
    seed=st.integers(0, 10**6),
    covered=st.sampled_from([1.0, 0.3, 0.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([0.0, 1.0, 40.0]),
)
@settings(max_examples=60, deadline=None)
def test_no_loss_is_negative_and_all_gradients_are_numbers(
    kind: str, size: int, seed: int, covered: float, dtype: torch.dtype, scale: float
) -> None:
    t = distributions(4, size, seed, covered, spread=10.0).to(dtype)
    log_q = (scale * logits_of(4, size, seed + 1)).to(dtype).log_softmax(dim=-1)
    losses, gradient = row_loss(kind, 4)(log_q, t, *separate_rows(4))
    assert losses.dtype == gradient.dtype == dtype
    assert losses.isfinite().all() and gradient.isfinite().all()
    # KL to a distribution that is not whole may be negative: by how much is known.
    least = covered * torch.tensor(covered).log().item() if kind == "kl" and covered else 0.0
    assert (losses >= least - 1e-5).all()
    if covered == 0:
        assert not losses.any() and not gradient.any()


@pytest.mark.parametrize("covered", [1.0, 0.5])
def test_the_overlap_losses_are_zero_exactly_where_nothing_is_rejected(covered: float) -> None:
    t, (start, step) = distributions(3, 7, 5, covered), separate_rows(3)
    same = (t / covered).log()
    for loss in (BlendedOverlap(DECAY), log_overlap):
        losses, _ = loss(same.clone(), t, start, step)
        torch.testing.assert_close(losses, torch.zeros_like(losses), **CLOSE)
        assert (loss((same + logits_of(3, 7, 6)).log_softmax(dim=-1), t, start, step)[0] > 0).all()
    if covered < 1:
        # Any q that is more than t everywhere rejects nothing; KL wants one of them.
        spare = distributions(3, 7, 11, 1 - covered)
        losses, gradient = log_overlap((t + spare).log(), t, start, step)
        torch.testing.assert_close(losses, torch.zeros_like(losses), **CLOSE)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), **CLOSE)


def test_alpha_is_what_speculative_sampling_accepts() -> None:
    """Draw from q, accept with min(1, p / q): the probability of it, token by token."""
    logits, t = logits_of(4, 8, 7), distributions(4, 8, 8, 1.0)
    q = logits.softmax(dim=-1)
    accepted = [
        sum(float(q[row, v]) * min(1.0, float(t[row, v] / q[row, v])) for v in range(8))
        for row in range(4)
    ]
    losses, _ = log_overlap(logits.log_softmax(dim=-1), t, *separate_rows(4))
    assert losses.neg().exp().tolist() == pytest.approx(accepted)
    # Without any KL, lk is the probability of a rejection.
    losses, _ = BlendedOverlap(1e9)(logits.log_softmax(dim=-1), t, *separate_rows(4))
    assert (1 - losses).tolist() == pytest.approx(accepted)


@pytest.mark.parametrize("num", [1, 3])
def test_a_narrow_boundary_makes_acceptance_the_mass_on_the_best(num: int) -> None:
    logits, t = logits_of(6, 30, 9), distributions(6, 30, 10, 0.8)
    missed = 0.8 - t.gather(1, logits.topk(num, dim=-1).indices).sum(dim=-1)
    reach = Reach(6, 1, torch.device("cpu"))
    loss = BlendedTopMass(1e9, torch.tensor([num]), 1e-4, reach)
    losses, _ = loss(logits.log_softmax(dim=-1), t, *separate_rows(6))
    torch.testing.assert_close(losses, missed, rtol=0.0, atol=1e-3)


def test_a_step_counts_as_often_as_the_walk_gets_there() -> None:
    """In two calls or one: the product of the masses of the steps before it."""
    mass = torch.tensor([0.5, 0.25, 0.8, 0.1], dtype=torch.float64)
    start, step = torch.tensor([3, 0, 3, 3]), torch.tensor([1, 1, 2, 3])
    for cut in (0, 1, 2, 4):
        reach = Reach(4, 3, torch.device("cpu"))
        parts = [
            reach(start[rows], step[rows], mass[rows]) for rows in (slice(cut), slice(cut, None))
        ]
        assert torch.cat(parts).tolist() == pytest.approx([1.0, 1.0, 0.5, 0.4])


@given(
    size=st.integers(3, 60),
    num=st.integers(1, 10),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_soft_top_sums_to_k_and_keeps_the_order(
    size: int, num: int, seed: int, scale: float, dtype: torch.dtype
) -> None:
    num = min(num, size - 1)
    scores = (scale * logits_of(5, size, seed)).to(dtype)
    among = soft_top(scores, torch.full((5,), num))
    assert among.dtype == dtype and ((among >= 0) & (among <= 1)).all()
    torch.testing.assert_close(
        among.sum(dim=-1), torch.full((5,), float(num), dtype=dtype), rtol=2e-2, atol=0.0
    )
    order = scores.argsort(dim=-1)
    # Equal scores may differ in a last bit: sigmoids are computed several at a time.
    assert (among.gather(1, order).diff(dim=-1) >= -4 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("kind", ["lk", "lk-alpha", "acceptance"])
def test_a_drafter_that_is_certain_of_the_wrong_token_is_still_moved(kind: str) -> None:
    """At float32's limits the token wanted has no probability that is a number."""
    logits = torch.zeros(1, 6).index_fill(1, torch.tensor([0]), 200.0)
    t = torch.zeros(1, 6).index_fill(1, torch.tensor([3]), 1.0)
    _, gradient = row_loss(kind, 1, top=(1,))(logits.log_softmax(dim=-1), t, *separate_rows(1))
    assert gradient[0, 3] < -0.9 and gradient[0, 0] > 0.9
