"""A row that breaks a promise of the columns is found, wherever it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from vllm_redrafter.data import row_checks
from vllm_redrafter.data.dataset import Row, features
from vllm_redrafter.data.row_checks import first_broken_row

NAN = float("nan")
GOOD = Row(
    0,
    [1, 2, 9],
    [False, True, True],
    [[], [2, 7], [0, 8]],
    [[], [-0.5, -2.0], [0.0, float("-inf")]],
)
BROKEN = {
    "negative token": (replace(GOOD, input_ids=[1, -1, 9]), "outside"),
    "token at the vocabulary's end": (replace(GOOD, input_ids=[1, 2, 10]), "outside"),
    "missing token": (replace(GOOD, input_ids=[1, None, 9]), "outside"),
    "no tokens": (replace(GOOD, input_ids=None), "differ in length"),
    "short mask": (replace(GOOD, assistant_mask=[False, True]), "differ in length"),
    "short tops": (replace(GOOD, top_tokens=[[], [2, 7]]), "differ in length from input_ids"),
    "one top": (replace(GOOD, top_tokens=[[], [2, 7], [8]]), "do not have 2 entries"),
    "top of a prompt": (replace(GOOD, top_tokens=[[1, 2], [2, 7], [0, 8]]), "not have 2 entries"),
    "top outside": (replace(GOOD, top_tokens=[[], [2, 7], [0, 10]]), "outside"),
    "NaN": (replace(GOOD, top_log_probs=[[], [-0.5, NAN], [0.0, -1.0]]), "NaN"),
    "above 0": (replace(GOOD, top_log_probs=[[], [-0.5, -2.0], [0.5, -1.0]]), "above 0"),
}


def table(rows: list[Row], k: int) -> Any:
    columns = features(k)
    values = {name: [getattr(row, name) for row in rows] for name in columns}
    return pa.table(values, schema=columns.arrow_schema)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_checks, "ROWS_AT_ONCE", 3)


@pytest.mark.parametrize("k", [0, 2])
def test_good_rows_pass(k: int) -> None:
    assert first_broken_row(table([GOOD] * 8, k), 10, k) is None


@pytest.mark.parametrize("place", [0, 4, 7])
@pytest.mark.parametrize("case", BROKEN)
def test_the_first_broken_row_is_named(case: str, place: int) -> None:
    row, reason = BROKEN[case]
    rows = [GOOD] * 8
    rows[place] = row
    rows[7] = row
    found = first_broken_row(table(rows, 2), 10, 2)
    assert found is not None
    assert found[0] == place
    assert reason in found[1]


def test_without_top_log_probs_their_columns_are_not_asked_for() -> None:
    row, _ = BROKEN["negative token"]
    assert first_broken_row(table([GOOD, row], 0), 10, 0) == (
        1,
        "a token id is outside the target's vocabulary of 10",
    )
