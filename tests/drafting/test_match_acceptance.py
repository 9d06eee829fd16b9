# SPDX-License-Identifier: Apache-2.0
"""How probable paths found in the text are to be accepted."""

import numpy as np
import pytest

from vllm_redrafter.budget.match_acceptance import MEMORY, prior_acceptance
from vllm_redrafter.drafting.acceptance_model import MatchAcceptance
from vllm_redrafter.tree.context_matches import LONGEST_MATCH, MATCH_CLASSES

DEPTH = 4


def test_the_prior_rises_with_the_match_and_with_what_was_accepted_of_the_path() -> None:
    prior = prior_acceptance(DEPTH)
    assert prior.shape == (MATCH_CLASSES, DEPTH) and (np.diff(prior, axis=1) > 0).all()
    alone, agreed, parted = np.split(prior, 3)
    for source in np.split(alone, [LONGEST_MATCH]):
        assert (np.diff(source, axis=0) > 0).all()
    assert (parted < alone).all() and (alone < agreed).all()
    assert (prior > 0).all() and (prior < 1).all()


def test_what_is_accepted_is_learned_by_kind_length_and_depth() -> None:
    found = MatchAcceptance(DEPTH)
    before = found.probabilities.copy()
    kept = found.probabilities
    random = np.random.default_rng(0)
    size = 4000
    sampled, depths = np.ones(size, dtype=np.bool_), np.full(size, 3)
    found.observe(sampled, np.full(size, 2), depths, random.random(size) < 0.4)
    assert found.probabilities[1, 1, 2] == pytest.approx(0.4, abs=0.03)
    before[1, 1, 2] = found.probabilities[1, 1, 2]
    assert np.array_equal(found.probabilities, before)
    assert kept is found.probabilities, "engines hold it"


def test_older_observations_fade_and_what_was_never_accepted_keeps_a_probability() -> None:
    found, one = MatchAcceptance(DEPTH), np.zeros(1, dtype=np.bool_)
    for accepted, steps in ((True, 8), (False, 120)):
        for _ in range(steps * int(MEMORY)):
            found.observe(one, np.ones(1, np.int64), np.ones(1, np.int32), np.array([accepted]))
    assert found.probabilities[0, 0, 0] == pytest.approx(1 / MEMORY)
