# SPDX-License-Identifier: Apache-2.0
"""Requests, their arrival, and how answers are compared."""

import pytest
from soak_parts.client import Choice, Outcome
from soak_parts.comparison import difference
from soak_parts.load import BETWEEN, BURST, arrivals
from soak_parts.requests import KINDS, Request, requests


def test_requests_are_the_same_for_the_same_seed_alone() -> None:
    assert requests(50, 512, seed=3) == requests(50, 512, seed=3)
    assert requests(50, 512, seed=3) != requests(50, 512, seed=4)


def test_requests_are_of_all_kinds_and_what_samples_has_a_seed() -> None:
    made = requests(2000, 512, seed=0)
    assert {request.kind for request in made} == set(KINDS)
    assert all(("seed" in r.body) == bool(KINDS[r.kind]["temperature"]) for r in made)
    assert 0.08 < sum(r.abort_after is not None for r in made) / 2000 < 0.12
    assert 0.55 < sum(r.body["stream"] for r in made) / 2000 < 0.65
    assert all(2 <= token < 512 for r in made for token in r.body["prompt"])


def test_plain_vllm_is_not_told_what_it_does_not_know() -> None:
    made = [r for r in requests(200, 512, seed=0) if r.kind == "few nodes"]
    assert made and all("vllm_xargs" in r.body for r in made)
    assert not any("vllm_xargs" in r.for_plain() for r in made)


def test_arrivals_come_in_bursts_and_at_the_rate() -> None:
    times = arrivals(20 * (BURST + BETWEEN), rate=50.0, seed=1)
    assert times == sorted(times)
    assert times[0] == times[BURST - 1] < times[BURST]
    second = BURST + BETWEEN
    assert times[second] == times[second + BURST - 1]
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.1)


REQUEST = Request(0, "sampled", {"stream": True}, None)
STOPPING = Request(0, "stop string", {"stream": True, "stop": ["a"]}, None)


def answer(tokens: list[int], text: str = "", finish: str = "length", *probs: float) -> Outcome:
    return Outcome([Choice(tokens, text, list(probs), finish)])


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (answer([1, 9, 3]), "tokens from 1 on"),
        (answer([1, 2]), "tokens from 2 on"),
        (answer([1, 2, 3, 4]), "tokens from 3 on"),
        (answer([1, 2, 3], "x"), "text"),
        (answer([1, 2, 3], "", "stop"), "ended by stop"),
    ],
)
def test_a_difference_is_named(ours: Outcome, reason: str) -> None:
    found = difference(REQUEST, ours, answer([1, 2, 3]))
    assert found is not None and reason in found


def test_the_same_answer_has_no_difference() -> None:
    assert difference(REQUEST, answer([1, 2, 3]), answer([1, 2, 3])) is None


def test_log_probabilities_may_differ_by_rounding() -> None:
    plain = answer([1], "", "length", -1.0)
    assert difference(REQUEST, answer([1], "", "length", -1.0005), plain) is None
    for ours in (answer([1], "", "length", -1.1), answer([1])):
        assert difference(REQUEST, ours, plain) == "choice 0: log-probabilities"


def test_behind_a_stop_string_come_no_more_than_the_tokens_of_its_step() -> None:
    assert difference(STOPPING, answer([1, 2, 3], "x"), answer([1, 2], "x")) is None
    assert difference(STOPPING, answer([1, 5, 3], "x"), answer([1, 2], "x")) is not None
    assert difference(STOPPING, answer([1], "x"), answer([1, 2], "x")) is not None
    assert difference(STOPPING, answer([1, 2], "y"), answer([1, 2], "x")) is not None


def test_a_request_that_plain_vllm_did_not_answer_is_a_difference() -> None:
    plain = Outcome([Choice()], error="HTTP 500")
    found = difference(REQUEST, answer([1]), plain)
    assert found is not None and "HTTP 500" in found
