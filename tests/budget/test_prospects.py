"""What is expected of the next draft."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_redrafter.budget.prospects import (
    BELIEVED,
    LONGEST_AGE,
    REMEMBERED,
    TEXT_STEPS,
    TRUST,
    UNCALIBRATED,
    USUAL_LONGEST_AGE,
    Floats,
    Prospects,
)


def survival(accept: float, length: int = 5, width: int = 4, requests: int = 2) -> Floats:
    """[R, L, W] of a drafter whose best token is right with probability `accept`."""
    by_level = accept ** np.arange(1, length + 1)
    by_rank = 0.4 ** np.arange(width)
    explored = by_level[:, None] * by_rank
    return np.broadcast_to(explored, (requests, length, width)).astype(np.float32)


def after(*drafts: tuple[Floats, int], steps: int = 1) -> tuple[Prospects, int]:
    """Prospects after so many of each of these drafts, every so many steps; and the last step."""
    prospects, step = Prospects(5, 4), 0
    for explored, times in drafts:
        for _ in range(times):
            step += steps
            prospects.observe(explored, step)
    return prospects, step


def test_the_first_draft_counts_whole() -> None:
    prospects, step = after((survival(0.5), 1))
    assert prospects.expected(step) == pytest.approx(survival(0.5)[0], rel=1e-6)


def test_requests_count_alike() -> None:
    mixed = np.concatenate([survival(0.2, requests=1), survival(0.6, requests=1)])
    prospects, step = after((mixed, 1))
    assert prospects.expected(step)[0, 0] == pytest.approx(0.4)


def test_steady_drafts_are_expected_to_go_on() -> None:
    prospects, step = after((survival(0.2), 50), (survival(0.6), 3000))
    assert prospects.expected(step) == pytest.approx(survival(0.6)[0], rel=0.01)


def test_a_hard_passage_lowers_what_is_expected_but_not_to_what_it_was_worth() -> None:
    prospects, step = after((survival(0.6), 1000), (survival(0.1), 40))
    expected = prospects.expected(step)[0, 0]
    assert prospects.lately[0, 0] == pytest.approx(0.1, abs=0.02)
    assert 0.1 + 0.8 * (1 - TRUST) * 0.5 < expected < 0.1 + (1 - TRUST) * 0.5


def test_what_is_not_drafted_for_long_is_expected_to_be_as_usual() -> None:
    prospects, step = after((survival(0.6), 1000), (survival(0.1), 40))
    expected = [prospects.expected(step + n)[0, 0] for n in (0, 16, TEXT_STEPS, 8 * TEXT_STEPS)]
    assert expected == sorted(expected)
    assert expected[-1] > 0.5


def test_a_drafter_that_stays_bad_is_found_out_by_rare_drafts() -> None:
    prospects, step = after((survival(0.6), 1000))
    for _ in range(120):
        step += 128
        prospects.observe(survival(0.05), step)
    assert prospects.expected(step + 127)[0, 0] < 0.1
    assert 120 * USUAL_LONGEST_AGE < 1000


def test_what_a_calibration_said_before_it_had_learned_is_soon_forgotten() -> None:
    """A drafter that is never right, and that thought for its first 64 drafts that it always is."""
    prospects, step = after((survival(0.99), 64), (survival(0.001), 192))
    assert prospects.expected(step + 8 * TEXT_STEPS)[0, 0] < 0.01


def test_a_draft_after_a_pause_counts_as_several() -> None:
    often, _ = after((survival(0.2), 100), (survival(0.6), LONGEST_AGE))
    rare, step = after((survival(0.2), 100))
    rare.observe(survival(0.6), step + 10 * LONGEST_AGE)
    assert rare.lately == pytest.approx(often.lately, rel=1e-6)


def test_what_a_search_does_not_explore_moves_with_what_it_does() -> None:
    """A short chain says that the text has become easy: then its continuation has, too."""
    before, _ = after((survival(0.3), 50))
    both, _ = after((survival(0.3), 50), (survival(0.6, length=2, width=1), 50))
    assert both.lately[1, 0] == pytest.approx(0.36, rel=0.05)
    assert both.lately[2:] == pytest.approx(before.lately[2:] * 4, rel=0.1)
    assert both.lately[0, 1:] == pytest.approx(before.lately[0, 1:] * 2, rel=0.1)


def test_of_new_requests_the_usual_is_expected() -> None:
    """Those that were hard have gone: a whole batch of others, or a part of it."""
    prospects, step = after((survival(0.6), 1000), (survival(0.1), 40))
    hard, usual = prospects.lately[0, 0], prospects.expected(step + 50 * TEXT_STEPS)[0, 0]
    prospects.joined(0.5)
    assert prospects.lately[0, 0] == pytest.approx((hard + usual) / 2)
    prospects.joined(1.0)
    assert prospects.expected(step)[0, 0] == pytest.approx(usual)


def test_what_is_usual_counts_requests_and_not_drafts() -> None:
    """Full batches of easy text, each with a hard request that is left alone for as long."""
    prospects, step = Prospects(5, 4), 0
    for _ in range(60):
        for requests, accept in ((8, 0.6), (1, 0.1)):
            prospects.joined(1.0)
            for _ in range(20):
                step += 1
                prospects.observe(survival(accept, requests=requests), step)
    assert 0.5 < prospects.expected(step + 50 * TEXT_STEPS)[0, 0] < 0.6


def test_a_calibration_that_promises_too_much_is_believed_less() -> None:
    prospects, step = after((survival(0.5), 100))
    before = prospects.expected(step)
    assert prospects.truth == 1.0
    for _ in range(1000):
        prospects.verified(expected=2.0, accepted=1.5)
    # What it says counts as `BELIEVED` nodes beside the `REMEMBERED`.
    truth = (0.75 * REMEMBERED + BELIEVED) / (REMEMBERED + BELIEVED)
    assert prospects.truth == pytest.approx(truth, rel=0.01)
    assert prospects.expected(step) == pytest.approx(prospects.truth * before)


def test_a_few_nodes_that_were_not_accepted_say_little() -> None:
    prospects, _ = after((survival(0.5), UNCALIBRATED + 1))
    prospects.verified(expected=3.0, accepted=0.0)
    assert 0.9 < prospects.truth < 1.0


def test_what_came_of_old_nodes_is_forgotten() -> None:
    prospects, _ = after((survival(0.5), UNCALIBRATED + 1))
    for accepted, times in ((0.0, 500), (2.0, 2000)):
        for _ in range(times):
            prospects.verified(expected=2.0, accepted=accepted)
    assert prospects.truth == pytest.approx(1.0, abs=0.01)


def test_what_the_first_drafts_promised_is_not_held_against_later_ones() -> None:
    """Their calibration had not learned the drafter yet, and has since."""
    prospects, _ = after((survival(0.5), UNCALIBRATED))
    prospects.verified(expected=100.0, accepted=0.0)
    assert prospects.truth == 1.0
