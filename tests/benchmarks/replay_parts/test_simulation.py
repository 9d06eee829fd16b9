"""Decoding replayed: against its own arithmetic, and what the budget must make of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_parts.simulation import (
    Adaptive,
    Batch,
    Fixed,
    Graphs,
    Longest,
    Method,
    Yield,
    replay,
)
from replay_parts.traces import Searches, Traces
from step_cost_parts.floor import H200, Arithmetic, Weights
from step_cost_parts.jobs import SHAPES

from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.gate import BEGIN
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import SearchShape

LEAST = Arithmetic(SHAPES["llama-3-8b"], Weights(7_500_000_000, 200_000_000, 16_000_000), H200)
CHAIN = ReDrafterConfig(4, 1, 4)
WARM_UP = 300
"""Steps until the calibration of one request has learned that a drafter is useless."""
STEPS = 150


def chains(chance: float, log_prob: float, answers: int = 40, length: int = 50) -> Traces:
    """Text whose next token is the draft's with this chance, whatever the draft thinks of it."""
    generator = torch.Generator().manual_seed(1)
    places = answers * length
    hits = torch.rand(places, 4, 1, generator=generator) < chance
    log_probs = log_prob * torch.arange(1.0, 5.0).expand(places, 4).unsqueeze(2)
    searches = Searches(
        log_probs=log_probs,
        back_pointers=torch.zeros(places, 4, 1, dtype=torch.int64),
        accepted=hits.cumprod(dim=1).bool(),
    )
    return Traces({1: searches}, torch.arange(length, 0, -1).repeat(answers))


def decoded(
    method: type[Adaptive] | type[Fixed], traces: Traces, requests: int, steps: int = STEPS
) -> Yield:
    batch = Batch(LEAST, requests, 512)
    return replay(method(traces, batch, CHAIN), traces.left, requests, WARM_UP, steps, seed=0)


def ratio(found: Yield, requests: int) -> float:
    return found.tokens_per_second / Batch(LEAST, requests, 512).plain_rate


def test_a_fixed_step_costs_its_draft_and_its_rows() -> None:
    """Half of the tokens are drafted: 1 + 1/2 + 1/4 + 1/8 + 1/16 of them per step."""
    found = decoded(Fixed, chains(0.5, -0.7), requests=8)
    batch = Batch(LEAST, 8, 512)
    seconds = batch.draft_seconds(SearchShape(1, 4)) + batch.step_seconds(8 * 5)
    assert found.tokens_per_second == pytest.approx(8 * found.tokens_per_step / seconds)
    # Answers end in between, which costs their last steps a little.
    assert found.tokens_per_step == pytest.approx(1.94, rel=0.05)
    assert (found.nodes, found.undrafted) == (4, 0)


def test_a_large_batch_makes_a_fixed_shape_slower_than_plain_decoding_and_not_the_budget() -> None:
    traces = chains(0.5, -0.7)
    assert ratio(decoded(Fixed, traces, 1), 1) > 1.5
    assert ratio(decoded(Fixed, traces, 512), 512) < 0.6
    assert ratio(decoded(Adaptive, traces, 512), 512) > 1 / (1 + BEGIN)


@pytest.mark.parametrize("requests", [1, 16, 512])
@pytest.mark.parametrize("log_prob", [-0.01, -3.0])
def test_a_useless_drafter_costs_next_to_nothing(requests: int, log_prob: float) -> None:
    """However sure it is of itself: its calibration finds out, and the gate closes."""
    found = decoded(Adaptive, chains(0.0, log_prob), requests)
    assert ratio(found, requests) > 0.98
    assert found.undrafted > 0.85


@pytest.mark.parametrize("requests", [1, 16])
def test_the_budget_is_not_far_from_the_best_fixed_length(requests: int) -> None:
    """Where all tokens are alike there is nothing to choose between requests."""
    traces = chains(0.8, -0.3)
    batch, steps = Batch(LEAST, requests, 512), 2000 // requests
    best = max(
        replay(Fixed(traces, batch, config), traces.left, requests, 0, steps, 0).tokens_per_second
        for config in (ReDrafterConfig(k, 1, 4) for k in range(1, 5))
    )
    assert decoded(Adaptive, traces, requests, steps).tokens_per_second > 0.95 * best


def test_the_calibration_learns_what_the_draft_does_not_know() -> None:
    traces, batch = chains(0.8, -1.2), Batch(LEAST, 8, 512)
    method = Adaptive(traces, batch, CHAIN)
    replay(method, traces.left, 8, warm_up=STEPS, steps=STEPS, seed=0)
    found = method.calibration
    assert found.draft == pytest.approx(0.5, abs=0.03)
    assert found.calibrated < 0.05
    assert found.judged > 0


def test_every_answer_is_decoded_equally_often_and_by_a_seed() -> None:
    """A method that accepts nothing passes every place of an answer."""
    traces, seen = chains(0.0, -1.0, answers=7, length=5), np.zeros(35, dtype=int)

    class Watched(Fixed):
        def step(self, places: torch.Tensor, joined: Flags) -> object:  # type: ignore[override]
            np.add.at(seen, places.numpy(), 1)
            return super().step(places, joined)

    method: Method = Watched(traces, Batch(LEAST, 3, 512), CHAIN)
    first = replay(method, traces.left, 3, warm_up=0, steps=7 * 5 * 20, seed=3)
    visits = seen.reshape(7, 5).sum(axis=1)
    assert visits.max() - visits.min() <= 2 * 5
    assert first == replay(method, traces.left, 3, warm_up=0, steps=7 * 5 * 20, seed=3)


def test_levels_that_bring_nothing_are_left_out() -> None:
    """Only the first drafted token may be right, and a level costs as much as several rows."""
    traces = chains(0.7, -0.3)
    traces.by_width[1].accepted[:, 1:] = False
    batch = Batch(LEAST, 16, 512, launch_seconds=2e-5)
    lengths, longest = (kind(traces, batch, CHAIN) for kind in (Graphs, Longest))
    found = {
        method: replay(method, traces.left, 16, WARM_UP, STEPS, seed=0)
        for method in (lengths, longest)
    }
    assert (lengths.choice.best, longest.choice.best) == (1, 4)
    faster = found[lengths].tokens_per_second / found[longest].tokens_per_second
    drafts = [batch.draft_seconds(SearchShape(1, length)) for length in (1, 4)]
    assert 1.02 < faster < 1 + (drafts[1] - drafts[0]) / batch.step_seconds(16)


def test_a_launch_is_given_its_time() -> None:
    without, given = (Batch(LEAST, 8, 512, seconds) for seconds in (0.0, 1e-6))
    more = given.draft_seconds(SearchShape(2, 3)) - without.draft_seconds(SearchShape(2, 3))
    assert more == pytest.approx(24e-6)
