# SPDX-License-Identifier: Apache-2.0
"""Which differences from plain decoding count as sound."""

from typing import Any

import pytest
from first_gpu_parts.parity import is_sound


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
