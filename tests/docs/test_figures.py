# SPDX-License-Identifier: Apache-2.0
"""Pages that repeat figures have those of the page where they were first given."""

import re
from pathlib import Path

REPO = Path(__file__).parents[2]
FIGURE = re.compile(r"(?<![\w.])\d+\.\d\d(?!\d|\.\d)")
"""× plain, with two decimals; no version."""


def text(name: str) -> str:
    return (REPO / name).read_text()


def table_below(heading: str, document: str) -> str:
    found = re.search(r"(?:^\|.*\n)+", document.split(f"\n## {heading}\n", 1)[1], re.MULTILINE)
    assert found is not None
    return found[0]


def test_the_landing_page_has_the_readme_s_table_of_results() -> None:
    assert table_below("Results", text("docs/index.md")) == table_below(
        "Results", text("README.md")
    )


def test_every_speed_up_to_choose_by_was_measured() -> None:
    measured = FIGURE.findall(text("docs/numbers.md")) + FIGURE.findall(text("docs/heads.md"))
    chosen_by = FIGURE.findall(text("docs/choose.md"))
    assert len(chosen_by) > 30
    assert not sorted(set(chosen_by) - set(measured))


def test_the_readme_s_speed_ups_are_those_of_the_numbers() -> None:
    measured = FIGURE.findall(text("docs/numbers.md"))
    assert not sorted(
        set(FIGURE.findall(table_below("Results", text("README.md")))) - set(measured)
    )


def test_the_readme_is_read_in_minutes() -> None:
    assert len(text("README.md").split()) <= 700
