# SPDX-License-Identifier: Apache-2.0
"""A row that breaks a promise of the columns is found, wherever it is."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from vllm_redrafter.data import row_checks
from vllm_redrafter.data.dataset import COLUMNS, Row
from vllm_redrafter.data.row_checks import first_broken_row

GOOD = Row(0, [1, 2, 9], [False, True, True])
BROKEN = {
    "negative token": (replace(GOOD, input_ids=[1, -1, 9]), "outside"),
    "token at the vocabulary's end": (replace(GOOD, input_ids=[1, 2, 10]), "outside"),
    "missing token": (replace(GOOD, input_ids=[1, None, 9]), "outside"),
    "no tokens": (replace(GOOD, input_ids=None), "differ in length"),
    "short mask": (replace(GOOD, assistant_mask=[False, True]), "differ in length"),
}


def table(rows: list[Row]) -> Any:
    values = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    return pa.table(values, schema=COLUMNS.arrow_schema)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_checks, "ROWS_AT_ONCE", 3)


def test_good_rows_pass() -> None:
    assert first_broken_row(table([GOOD] * 8), 10) is None


@pytest.mark.parametrize("place", [0, 4, 7])
@pytest.mark.parametrize("case", BROKEN)
def test_the_first_broken_row_is_named(case: str, place: int) -> None:
    row, reason = BROKEN[case]
    rows = [GOOD] * 8
    rows[place] = row
    rows[7] = row
    found = first_broken_row(table(rows), 10)
    assert found is not None
    assert found[0] == place
    assert reason in found[1]
