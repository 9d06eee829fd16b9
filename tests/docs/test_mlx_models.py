# SPDX-License-Identifier: Apache-2.0
"""docs/mlx-models.md lists what the tests accept and refuse, and every model of mlx-lm."""

import re
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")
models = pytest.importorskip("mlx_lm.models")

from redrafter_testing.models import mlx_models
from redrafter_testing.models.mlx_accepted import ACCEPTED, NOT_TRIED, REFUSED
from vllm_redrafter.mlx.target import windows

TEXT = (Path(__file__).parents[2] / "docs" / "mlx-models.md").read_text()


def table(heading: str) -> dict[str, list[str]]:
    """By the first cell of a row, the names in the second."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    return {cells[0].removeprefix("| "): re.findall(r"`([\w-]+)`", cells[1]) for cells in rows}


def has_window(name: str) -> bool:
    return any(windows(mlx_models.tiny_model(name)))


def test_the_accepted_models_are_those_that_the_tests_accept() -> None:
    listed = table("Accepted")
    assert sorted(chain.from_iterable(listed.values())) == sorted(ACCEPTED)
    assert list(map(has_window, listed["to all tokens"])) == [False] * len(listed["to all tokens"])
    assert all(map(has_window, listed["in some layers to a sliding window"]))


@pytest.mark.parametrize(
    ("heading", "tested"),
    [("Refused", REFUSED), ("Not tried", NOT_TRIED)],
)
def test_the_others_are_listed_by_their_reason(heading: str, tested: dict[str, list[str]]) -> None:
    assert table(heading) == {
        reason: sorted(names, key=str.lower) for reason, names in tested.items()
    }


def test_every_model_of_mlx_lm_is_listed() -> None:
    files = [path for folder in models.__path__ for path in Path(folder).glob("*.py")]
    has_model = re.compile(r"^class Model\(|^from .* import .*\bModel\b", re.MULTILINE)
    of_mlx_lm = {path.stem for path in files if has_model.search(path.read_text())}
    others = chain(REFUSED.values(), NOT_TRIED.values())
    assert sorted([*ACCEPTED, *chain.from_iterable(others)]) == sorted(of_mlx_lm)
    assert len(of_mlx_lm) > 100
