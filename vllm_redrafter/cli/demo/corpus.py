"""Text that every Python installation has: sources of its standard library."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

MODULES = ("argparse", "configparser", "dataclasses")
"""200 KB of code, comments and docstrings: a model that trains for two minutes reads them several
times, and then writes text that is as predictable as a large model's, instead of looping."""

EXCERPT_LINES = 3


def standard_library_sources(modules: Sequence[str] = MODULES) -> list[str]:
    """The modules' source texts."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [(folder / f"{module}.py").read_text(encoding="utf-8") for module in modules]


def excerpts(sources: Sequence[str], seed: int = 0) -> list[str]:
    """All runs of three lines, the last of which is not empty, in random order: the prompts."""
    found = []
    for source in sources:
        lines = source.split("\n")
        found += [
            "\n".join(lines[end - EXCERPT_LINES : end]) + "\n"
            for end in range(EXCERPT_LINES, len(lines) + 1)
            if lines[end - 1].strip()
        ]
    random.Random(seed).shuffle(found)
    return found
