# SPDX-License-Identifier: Apache-2.0
"""Where answers leave plain decoding's, and what counts as sound."""

from typing import Any

import pytest
from first_gpu_parts.parity import differences, is_sound


def answer(tokens: list[int], *logprobs: dict[str, float]) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": list(logprobs)}


PLAIN = [
    answer([5, 6, 7], {"5": -0.1}, {"6": -0.5, "9": -0.7}, {"7": -0.1}),
    answer([1, 2]),
    answer([3, 4]),
]


def test_of_each_answer_the_first_difference_is_told() -> None:
    first, second = differences(PLAIN, [answer([5, 9, 8]), answer([1]), answer([3, 4])])
    assert (first["request"], first["position"]) == (0, 1)
    assert first["gap"] == pytest.approx(0.2)
    assert second == {"request": 1, "position": 1, "gap": None}
    (improbable,) = differences(PLAIN[:1], [answer([8, 6, 7])])
    assert improbable == {"request": 0, "position": 0, "gap": None}


def engines(**changed: Any) -> dict[str, Any]:
    agreement = {"greedy": {"equal": 8, "of": 8, "differences": []}}
    sound = {"checks": "error", "accepted": 50, "agreement": agreement}
    return {"plain": {**sound, "accepted": None}, "fixed": {**sound, **changed}}


def apart(gap: float | None) -> dict[str, Any]:
    differences = [{"request": 0, "position": 4, "gap": gap}]
    return {"greedy": {"equal": 7, "of": 8, "differences": differences}}


@pytest.mark.parametrize(
    ("changed", "sound"),
    [
        ({}, True),
        ({"checks": "warn"}, False),
        ({"checks": None, "accepted": None, "agreement": {}}, False),
        ({"accepted": 3}, False),
        ({"agreement": apart(0.01)}, False),
        ({"agreement": apart(None)}, False),
    ],
    ids=["all well", "checks failed", "engine failed", "no drafts", "a near-tie", "another answer"],
)
def test_what_is_sound(changed: dict[str, Any], sound: bool) -> None:
    assert is_sound(engines(**changed)) == sound
