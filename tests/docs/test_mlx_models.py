# SPDX-License-Identifier: Apache-2.0
"""docs/mlx-models.md lists what the tests accept and refuse, and every model of mlx-lm."""

import re
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")
models = pytest.importorskip("mlx_lm.models")

from redrafter_testing.models.mlx_models import ACCEPTED, REFUSED

TEXT = (Path(__file__).parents[2] / "docs" / "mlx-models.md").read_text()


def table(heading: str) -> dict[str, set[str]]:
    """By the first cell of a row, the names in the second."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    return {cells[0].removeprefix("| "): set(re.findall(r"`([\w-]+)`", cells[1])) for cells in rows}


def test_what_the_tests_accept_is_listed_as_accepted() -> None:
    assert set(ACCEPTED) <= set().union(*table("Accepted").values())


def test_what_the_tests_refuse_is_listed_by_its_reason() -> None:
    listed = table("Refused")
    assert listed.keys() == REFUSED.keys()
    assert [name for reason, name in REFUSED.items() if name not in listed[reason]] == []


def test_every_model_of_mlx_lm_is_listed() -> None:
    files = [path for folder in models.__path__ for path in Path(folder).glob("*.py")]
    has_model = re.compile(r"^class Model\(|^from .* import .*\bModel\b", re.MULTILINE)
    of_mlx_lm = {path.stem for path in files if has_model.search(path.read_text())}
    tables = (table(heading).values() for heading in ("Accepted", "Refused", "Not tried"))
    assert {name for names in tables for row in names for name in row} == of_mlx_lm
    assert len(of_mlx_lm) > 100
