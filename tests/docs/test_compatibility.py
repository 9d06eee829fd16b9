# SPDX-License-Identifier: Apache-2.0
"""The table of targets says what the tests show: no family more, none less, none otherwise."""

import re
from pathlib import Path

import pytest

from redrafter_testing.models.families import FAMILIES
from redrafter_testing.models.families.chained import CHAINED
from redrafter_testing.models.families.quantised import QUANTISED
from redrafter_testing.models.families.without_trees import CHAINS_ALONE, REFUSED

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
SHOWN = {"cpu": r"(chains: )?run\b", "v2": r"(chains: )?(interpreter|Hopper)\b"}
SERVED = (*FAMILIES, *CHAINED)
NO_TREES = (*CHAINED, *CHAINS_ALONE, *REFUSED)


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    text = DOCUMENT.read_text().split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()]
    return cells[2:]


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
