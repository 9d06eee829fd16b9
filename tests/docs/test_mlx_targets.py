"""The table of targets in MLX says what the tests show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from redrafter_testing.models.mlx_models import ACCEPTED, NOT_TRIED, REFUSED

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"


def documented() -> dict[str, set[str]]:
    """The modules of each row, by what is said of MLX's CPU build."""
    text = DOCUMENT.read_text().split("\n### Targets in MLX\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return {said.strip(): set(re.findall(r"`([\w.-]+)`", names)) for names, said, _ in rows}


def test_every_module_stands_in_the_row_of_what_its_test_shows() -> None:
    shown = {"run": ACCEPTED}
    shown |= {f"refused: {reason}": tuple(names) for reason, names in REFUSED.items()}
    shown |= {f"not run: {reason}": tuple(names) for reason, names in NOT_TRIED.items()}
    assert documented() == {said: set(names) for said, names in shown.items()}
