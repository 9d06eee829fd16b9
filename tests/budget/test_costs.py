"""Tables of costs: interpolation, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.utils.errors import ConfigError


def table(**changes: object) -> CostTable:
    values = {
        "target": "t",
        "drafter": "d",
        "device": "cpu",
        "draft": (
            DraftCost(1, 4, 1, 1.0),
            DraftCost(1, 4, 5, 3.0),
            DraftCost(3, 4, 1, 2.0),
            DraftCost(3, 4, 5, 8.0),
        ),
        "verify": (VerifyCost(1, 10.0), VerifyCost(5, 12.0), VerifyCost(9, 20.0)),
    } | changes
    return CostTable(**values)  # type: ignore[arg-type]


def test_costs_between_measurements_lie_on_the_line() -> None:
    assert table().verify_seconds([1, 3, 7]).tolist() == [10.0, 11.0, 16.0]
    assert table().draft_seconds(1, 4, 3) == pytest.approx(2.0)
    assert table().draft_seconds(2, 4, 5) == pytest.approx(5.5)


def test_costs_beyond_the_last_measurement_follow_the_last_slope() -> None:
    assert table().verify_seconds(11) == pytest.approx(24.0)
    assert table().draft_seconds(4, 4, 1) == pytest.approx(2.5)


def test_more_work_never_takes_less_time() -> None:
    noisy = table(verify=(VerifyCost(1, 10.0), VerifyCost(2, 9.0), VerifyCost(3, 11.0)))
    assert noisy.verify_seconds([1, 2, 3]).tolist() == [9.0, 9.0, 11.0]


def test_less_of_a_search_is_never_dearer_than_more_of_it() -> None:
    """What was added to the chain, to one level, or to one request is a disturbance."""
    noisy = table(
        draft=(
            DraftCost(1, 1, 1, 2.5),
            DraftCost(1, 1, 5, 9.0),
            DraftCost(2, 1, 5, 7.0),
            DraftCost(1, 4, 1, 2.0),
            DraftCost(1, 4, 5, 6.0),
            DraftCost(2, 4, 5, 8.0),
        )
    )
    assert [noisy.draft_seconds(1, 1, length) for length in (1, 5)] == [2.0, 6.0]
    assert noisy.draft_seconds(2, 1, 5) == 7.0
    assert [noisy.draft_seconds(n, 4, 5) for n in (1, 2)] == [6.0, 8.0]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(table().to_json())
    assert CostTable.read(path) == table()


def test_a_width_that_was_not_measured_is_named() -> None:
    with pytest.raises(ConfigError, match="beam width 3 was measured, only of 4"):
        table().draft_seconds(1, 3, 2)


@pytest.mark.parametrize("changes", [{"draft": ()}, {"verify": ()}])
def test_an_empty_table_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="without entries"):
        table(**changes)


@pytest.mark.parametrize("seconds", [0.0, -1.0, "1"])
def test_a_cost_that_is_no_positive_number_is_refused(seconds: object) -> None:
    with pytest.raises(ConfigError, match="not a positive number"):
        table(verify=(VerifyCost(1, seconds),))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"format": "other"})])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json: not a table of costs"):
        CostTable.read(path)
