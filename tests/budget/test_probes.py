"""Drafts that are made although they do not seem to pay."""

from __future__ import annotations

from vllm_redrafter.budget.probes import FULL_PROBES, PROBE, ColdDrafts, Probes
from vllm_redrafter.policy import SearchShape

NEAREST, FULL = SearchShape(1, 3), SearchShape(4, 5)


def test_a_probe_is_some_drafts_of_one_search() -> None:
    probes = Probes()
    for _ in range(2):
        drafts = [probes.begin(NEAREST, FULL)]
        while probes.left:
            drafts.append(probes.go_on())
        assert len(drafts) == PROBE
        assert len(set(drafts)) == 1


def test_some_probes_are_the_full_search() -> None:
    probes = Probes()
    begun = [probes.begin(NEAREST, FULL) for _ in range(3 * FULL_PROBES)]
    assert begun == ([FULL] + [NEAREST] * (FULL_PROBES - 1)) * 3


def test_a_probe_ends_with_its_batch() -> None:
    probes = Probes()
    probes.begin(NEAREST, FULL)
    probes.end()
    assert not probes.left


def test_the_first_draft_behind_plain_steps_is_cold_and_so_is_the_step_that_verifies_it() -> None:
    cold = ColdDrafts()
    drafts = []
    for planned in (False, True, True, False, False, True):
        cold.planned(planned)
        drafts.append(cold.is_cold_draft())
    assert drafts == [False, True, False, False, False, True]


def test_one_step_that_verifies_is_cold() -> None:
    cold = ColdDrafts()
    cold.planned(False)
    cold.planned(True)
    # This step is plain, as the draft is for the next one, which may draft as well.
    cold.planned(True)
    assert [cold.is_cold_step() for _ in range(2)] == [True, False]
