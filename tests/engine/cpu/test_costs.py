"""What is run at start-up so that no request waits for it."""

from __future__ import annotations

import pytest

from vllm_redrafter.engine.cpu import costs


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the target's passes, each of which takes a quarter of a second."""
    made: list[int] = []
    monkeypatch.setattr(costs, "_target_pass", lambda _, rows: made.append(rows))
    monkeypatch.setattr(costs, "perf_counter", lambda: 0.25 * len(made))
    return made


def test_each_number_of_rows_is_met_once(passes: list[int]) -> None:
    costs.meet_sizes(None, 3)  # type: ignore[arg-type]
    assert passes == [1, 2, 3]


def test_a_large_target_meets_as_many_as_the_time_allows(passes: list[int]) -> None:
    costs.meet_sizes(None, 100)  # type: ignore[arg-type]
    assert passes[-1] == len(passes) == 4 * costs.MEETING_SECONDS + 1
