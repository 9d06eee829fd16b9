# SPDX-License-Identifier: Apache-2.0
"""The tables of targets say what the tests show: no family more, none less, none otherwise."""

import re
from pathlib import Path

import pytest

from redrafter_testing.models.families import FAMILIES
from redrafter_testing.models.families.chained import CHAINED
from redrafter_testing.models.families.quantised import QUANTISED
from redrafter_testing.models.families.without_trees import CHAINS_ALONE, REFUSED

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = {"cpu": r"(chains: )?run\b", "v2": r"(chains: )?(interpreter|Hopper)\b"}
SERVED = (*FAMILIES, *CHAINED)
NO_TREES = (*CHAINED, *CHAINS_ALONE, *REFUSED)


def rows_of(heading: str, document: str = "compatibility.md") -> list[list[str]]:
    """The cells of the first table below a heading."""
    text = (DOCS / document).read_text().split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()][2:]


FAMILY_ROWS = {
    name: (cpu, cuda)
    for classes, cpu, cuda in rows_of("## Targets")
    for name in re.findall(r"`(\w+)`", classes)
}


def test_every_tested_family_has_its_row_and_every_row_its_test() -> None:
    tested = {family.architecture for family in (*FAMILIES, *NO_TREES)}
    assert FAMILY_ROWS.keys() == tested
    assert len(tested) >= 30


@pytest.mark.parametrize("architecture", sorted({f.architecture for f in SERVED}))
def test_a_served_family_s_words_are_its_tests(architecture: str) -> None:
    engines = {e for f in SERVED if f.architecture == architecture for e in f.engines}
    for engine, word in zip(("cpu", "v2"), FAMILY_ROWS[architecture], strict=True):
        assert bool(re.match(SHOWN[engine], word)) == (engine in engines), (engine, word)


@pytest.mark.parametrize("architecture", [family.architecture for family in NO_TREES])
def test_the_words_of_a_family_without_trees_say_so(architecture: str) -> None:
    assert all(re.match("refused: |chains", word) for word in FAMILY_ROWS[architecture])


def test_quantised_targets_have_their_rows() -> None:
    rows = {name: (cpu, cuda) for name, cpu, cuda in rows_of("### Quantised targets")}
    assert rows.keys() == {family.feature for family in QUANTISED}
    for family in QUANTISED:
        for engine, word in zip(("cpu", "v2"), rows[family.feature], strict=True):
            assert bool(re.match(SHOWN[engine], word)) == (engine in family.engines)


def mlx_models(heading: str) -> dict[str, set[str]]:
    """By the first cell of a row, the names in the second."""
    rows = rows_of(f"## {heading}", "mlx-models.md")
    return {row[0]: set(re.findall(r"`([\w-]+)`", row[1])) for row in rows}


def test_mlx_models_that_the_tests_accept_or_refuse_are_listed() -> None:
    tested = pytest.importorskip("redrafter_testing.models.mlx_models")
    assert set(tested.ACCEPTED) <= set().union(*mlx_models("Accepted").values())
    listed = mlx_models("Refused")
    assert listed.keys() == tested.REFUSED.keys()
    assert all(name in listed[reason] for reason, name in tested.REFUSED.items())


def test_every_model_of_mlx_lm_is_listed() -> None:
    models = pytest.importorskip("mlx_lm.models")
    files = [path for folder in models.__path__ for path in Path(folder).glob("*.py")]
    has_model = re.compile(r"^class Model\(|^from .* import .*\bModel\b", re.MULTILINE)
    of_mlx_lm = {path.stem for path in files if has_model.search(path.read_text())}
    tables = (mlx_models(heading).values() for heading in ("Accepted", "Refused", "Not tried"))
    assert {name for names in tables for row in names for name in row} == of_mlx_lm
    assert len(of_mlx_lm) > 100
