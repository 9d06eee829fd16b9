# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint records of its drafter's acceptance: written, read, and refused if broken."""

import json
from typing import Any

import pytest

from vllm_redrafter.checkpoints.acceptance import (
    NOTHING_RECORDED,
    AcceptanceRecord,
    PerSampling,
    acceptance_entry,
    acceptance_of,
)
from vllm_redrafter.utils.errors import ConfigError

GREEDY = AcceptanceRecord(0.8, (0.1, -0.3), ((0.7, 0.1, 0.05), (0.5, 0.2, 0.0)))
SAMPLED = AcceptanceRecord(0.5, (0.0,), ((0.6,),))
VALID = {"slope": 0.8, "biases": [0.1], "survival": [[0.7, 0.1]]}


@pytest.mark.parametrize(
    ("measured", "filled"),
    [
        (NOTHING_RECORDED, NOTHING_RECORDED),
        (PerSampling(greedy=GREEDY), PerSampling(GREEDY, GREEDY)),
        (PerSampling(sampled=SAMPLED), PerSampling(SAMPLED, SAMPLED)),
        (PerSampling(GREEDY, SAMPLED), PerSampling(GREEDY, SAMPLED)),
    ],
)
def test_what_was_written_is_read_and_one_kind_stands_for_the_other(
    measured: PerSampling, filled: PerSampling
) -> None:
    config = json.loads(json.dumps({"model_type": "redrafter", **acceptance_entry(measured)}))
    assert acceptance_of(config) == measured
    assert measured.with_fallback() == filled
    assert measured != NOTHING_RECORDED or acceptance_entry(measured) == {}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "acceptance: expected entries of greedy and sampled, got 3"),
        ({"beams": VALID}, "expected entries of greedy and sampled"),
        ({"greedy": 3}, "acceptance.greedy"),
        ({"greedy": VALID | {"slope": "steep"}}, "could not convert"),
        ({"greedy": VALID | {"slope": -1}}, "slope must be a number of at least 0, got -1"),
        ({"greedy": VALID | {"slope": float("nan")}}, "slope must be a number"),
        ({"sampled": VALID | {"biases": []}}, "acceptance.sampled: biases must be numbers"),
        ({"greedy": VALID | {"biases": [float("inf")]}}, "biases must be numbers"),
        ({"greedy": VALID | {"biases": [0.1, 0.2]}}, "survival must have 2 levels"),
        ({"greedy": VALID | {"survival": [[]]}}, "levels of the same width"),
        ({"greedy": {"slope": 1.0, "biases": [0, 0], "survival": [[0.5], [0.2, 0.1]]}}, "width"),
        ({"greedy": VALID | {"survival": [[1.5]]}}, "from 0 to 1"),
        ({"greedy": {"slope": 1.0}}, "'biases'"),
    ],
)
def test_a_broken_record_is_refused_with_its_place_and_the_remedy(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        acceptance_of({"acceptance": entry})
    assert message in str(refused.value)
    assert "evaluate --record" in str(refused.value)
