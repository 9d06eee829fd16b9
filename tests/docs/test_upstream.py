# SPDX-License-Identifier: Apache-2.0
"""docs/upstream.md lists all that is changed in vLLM, and nothing that is not."""

import re
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs" / "upstream.md").read_text()


def source(name: str) -> str:
    return (REPO / "vllm_redrafter" / name).read_text()


def first_cells(heading: str) -> set[str]:
    """The names in the first column of a section's table."""
    section = PAGE.split(heading, 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))


def test_every_wrap_has_its_row_and_every_row_its_wrap() -> None:
    wraps = re.findall(r'_wrap\((\w+), "(\w+)"', source("plugin.py"))
    assert len(wraps) == 7
    assert first_cells("# What vLLM could take over") == {".".join(wrap) for wrap in wraps}


def test_every_exchanged_name_has_its_row_and_every_row_is_exchanged() -> None:
    names = re.findall(r'patched\(model_runner, "(\w+)"', source("engine/cuda/runner.py"))
    assert first_cells("## 4. Classes of the runner") == set(names)
