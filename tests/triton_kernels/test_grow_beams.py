# SPDX-License-Identifier: Apache-2.0
"""Each level's beams are those of a stable sort, and what goes with them is the budget's."""

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_top_candidates
from vllm_redrafter.budget import acceptance
from vllm_redrafter.budget.acceptance import AcceptanceEstimator, log_odds_of
from vllm_redrafter.triton_kernels import grow_beams as kernel
from vllm_redrafter.triton_kernels.grow_beams import BeamBuffers, grow_beams
from vllm_redrafter.triton_kernels.top_candidates import TopTokens

GARBAGE = -77


def naive_grow_beams(
    top: TopTokens, above: Tensor | None, beam_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`grow_beams` by a stable sort, in float64: tokens, back-pointers, log-probabilities."""
    scores = top.logits.double() - top.normalisers.double()[:, None]
    if above is not None:
        scores = scores + above.double().reshape(-1, 1)
    requests = len(scores) if above is None else len(above)
    # In the kernel's precision, in which candidates tie.
    flat = scores.float().reshape(requests, -1)
    best, index = flat.sort(dim=1, descending=True, stable=True)
    best, index = best[:, :beam_width], index[:, :beam_width]
    tokens = top.tokens.reshape(requests, -1).long().gather(1, index)
    return tokens, index // beam_width, best


def random_top(rows: int, width: int, seed: int, vocabulary: int = 60) -> TopTokens:
    """Multiples of 1/4 and a normaliser of 0.5: exact sums, and many ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = -torch.randint(9, (rows, vocabulary), generator=generator).float() / 4
    top = naive_top_candidates(logits, width)
    return top._replace(normalisers=torch.full((rows,), 0.5))


def on(device: torch.device, top: TopTokens) -> TopTokens:
    return TopTokens(*(field.to(device) for field in top))


def buffers(requests: int, length: int, width: int, device: torch.device) -> BeamBuffers:
    """Full of what no search finds: all that a level has must be written."""
    out = BeamBuffers(requests, length, width, device)
    for tensor in vars(out).values():
        tensor.fill_(GARBAGE)
    return out


@pytest.mark.parametrize(("width", "is_chain"), [(1, False), (7, False), (50, False), (7, True)])
def test_levels_grow_as_by_sorting(device: torch.device, width: int, is_chain: bool) -> None:
    """Two requests of three, whose beams tie; the other request is left alone. Of a chain, the best
    token of a level alone goes on."""
    length, requests = 3, 2
    out = buffers(3, length, width, device)
    above: Tensor | None = None
    for level in range(length):
        beams = 1 if level == 0 or is_chain else width
        top = random_top(requests * beams, width, seed=level)
        grow_beams(on(device, top), level, requests, out, beams=1 if is_chain else None)
        above = None if above is None else above[:, :beams]
        tokens, back_pointers, above = naive_grow_beams(top, above, width)
        for found, expected in (
            (out.tokens, tokens),
            (out.back_pointers, back_pointers),
            (out.log_probs, above),
        ):
            assert torch.equal(found[:requests, level].cpu(), expected)
            assert (found[requests:] == GARBAGE).all()
            assert (found[:, level + 1 :] == GARBAGE).all()
        assert out.last_tokens[: requests * width].tolist() == tokens.flatten().tolist()
        rows = back_pointers + beams * torch.arange(requests)[:, None]
        assert out.parents[: requests * width].tolist() == rows.flatten().tolist()
    assert (out.log_odds == GARBAGE).all() and (out.log_survival == GARBAGE).all()


KNOWN = torch.zeros(2, 1), torch.zeros(2, 2), torch.zeros(1)
"""Of one request: the parameters of greedy and sampled ones, and its temperature."""


def test_dead_beams_stay_dead(device: torch.device) -> None:
    """A vocabulary of two tokens: the first level has two beams, the second four of five."""
    out = buffers(1, 2, 5, device)
    for level, beams in ((0, 1), (1, 5)):
        logits = torch.zeros(beams, 2)
        top = on(device, naive_top_candidates(logits, 5))
        grow_beams(top, level, 1, out, survival=tuple(p.to(device) for p in KNOWN))
    live = out.log_probs[0] > -torch.inf
    assert live.sum(dim=1).tolist() == [2, 4]
    assert torch.equal(out.log_survival[0] > -torch.inf, live)
    assert not out.log_odds.isnan().any()


def test_log_odds_and_survival_are_the_budget_s(device: torch.device) -> None:
    """Of a greedy request, and of one that samples."""
    width, length, requests = 4, 3, 2
    estimator = AcceptanceEstimator(length + 1, device, kinds=(2,))
    estimator.slope.copy_(torch.tensor([[0.8], [0.4]]))
    estimator.biases.copy_(torch.tensor([[-0.3, 0.1, 0.2, 0.0], [0.4, 0.3, -0.2, 0.0]]))
    survival = estimator.slope, estimator.biases, torch.tensor([0.0, 0.7], device=device)
    out = buffers(requests, length, width, device)
    for level in range(length):
        logits = 4 * torch.randn(requests * (width if level else 1), 60)
        if level == 1:
            logits[0, 3] = 40.0  # certain: the log-odds are at their limit
        top = on(device, naive_top_candidates(logits, width))
        grow_beams(top, level, requests, out, survival=survival)
    log_odds = log_odds_of(out.log_probs, out.back_pointers)
    expected = estimator.log_survival(log_odds, out.log_probs, out.back_pointers)
    # The reference takes the probability given the parent back out of sums, with their rounding.
    sure = out.log_odds < 9
    assert sure.sum() > 20
    torch.testing.assert_close(out.log_odds[sure], log_odds[sure], rtol=1e-4, atol=1e-3)
    assert out.log_odds.max() > 14
    close = out.log_survival - expected
    assert close.abs().max() < 1e-2


def test_log_odds_of_any_probability_are_those_of_float64(device: torch.device) -> None:
    log_q = torch.tensor([-90.0, -20.0, -3.0, -0.5, -0.021, -0.019, -1e-3, -1e-6, 0.0])
    out = buffers(1, 1, len(log_q), device)
    tokens = torch.arange(len(log_q), dtype=torch.int32)[None]
    in_order = log_q.flip(0)[None]
    top = on(device, TopTokens(in_order, tokens, torch.zeros(1)))
    grow_beams(top, 0, 1, out, survival=tuple(p.to(device) for p in KNOWN))
    exact = in_order.double() - torch.log(-torch.expm1(in_order.double()))
    limit = acceptance.MAX_LOG_ODDS
    torch.testing.assert_close(out.log_odds[0].cpu(), exact.clamp(-limit, limit).float())
    assert limit == kernel.MAX_LOG_ODDS
