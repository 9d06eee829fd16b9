"""Drafts that are made although they do not seem to pay."""

from __future__ import annotations

import pytest

from vllm_redrafter.budget.probes import (
    COLD_LOSS,
    FULL_PROBES,
    LONGEST,
    SETTLING,
    SHORTEST,
    ColdDrafts,
    Probes,
    length,
)
from vllm_redrafter.tree.policy import SearchShape

NEAREST, FULL = SearchShape(1, 3), SearchShape(4, 5)


def test_a_probe_is_some_drafts_of_one_search() -> None:
    probes = Probes()
    for drafted in (SHORTEST, LONGEST):
        drafts = [probes.begin(NEAREST, FULL, gain=0.99)]
        while probes.left:
            drafts.append(probes.go_on())
        assert len(drafts) == drafted
        assert len(set(drafts)) == 1


def test_some_probes_are_the_full_search() -> None:
    probes = Probes()
    begun = [probes.begin(NEAREST, FULL, gain=0.9) for _ in range(3 * FULL_PROBES)]
    assert begun == ([FULL] + [NEAREST] * (FULL_PROBES - 1)) * 3


@pytest.mark.parametrize("gain", [0.3, 0.8, 0.9, 0.95, 0.99, 1.02])
def test_a_probe_is_as_long_as_costs_no_more_than_that_it_is_cold(gain: float) -> None:
    drafts = length(gain)
    assert SHORTEST <= drafts <= LONGEST
    if drafts > SHORTEST:
        assert drafts * (1.0 - gain) <= COLD_LOSS
    if drafts < LONGEST:
        assert (drafts + 1) * (1.0 - gain) > COLD_LOSS


def test_the_shortest_probe_tells_what_its_steps_take() -> None:
    assert SHORTEST > SETTLING


def test_a_probe_ends_with_its_batch() -> None:
    probes = Probes()
    probes.begin(NEAREST, FULL, gain=0.9)
    probes.end()
    assert not probes.left


def test_the_first_drafts_behind_plain_steps_are_cold() -> None:
    cold = ColdDrafts()
    drafts = []
    for planned in (False, *[True] * (SETTLING + 1), False, False, True):
        cold.planned(planned)
        drafts.append(cold.is_cold_draft())
    assert drafts == [False, *[True] * SETTLING, False, False, False, True]


def test_so_are_the_steps_that_verify_them() -> None:
    cold = ColdDrafts()
    for _ in range(2):
        cold.planned(False)
        # This step is plain, as the draft is for the next one, which drafts as well.
        cold.planned(True)
        steps = []
        for _ in range(SETTLING + 2):
            cold.planned(True)
            steps.append(cold.is_cold_step())
        assert steps == [True] * SETTLING + [False] * 2
