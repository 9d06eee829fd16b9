"""Prompts that come with the benchmark: what people ask of a small chat model, by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from throughput_parts.dataset import read_dataset
from throughput_parts.methods import InputError
from throughput_parts.prompts import ByTask

FOLDER = Path(__file__).parents[1] / "suites"
SUITES = ("chat", "summary", "code", "math")
ALL = "all"


def read_suites(names: Sequence[str]) -> ByTask:
    """The prompts of some suites, each a task of its own.

    Args:
        names: of SUITES, or ALL for all of them; one that is given twice counts once.

    Raises:
        InputError: there is no suite of a name.
    """
    for name in names:
        if name not in (*SUITES, ALL):
            raise InputError(f"--suite {name}: expected one of {', '.join(SUITES)}, or {ALL}")
    asked: ByTask = {}
    for name in SUITES if ALL in names else names:
        by_task, _ = read_dataset(FOLDER / f"{name}.jsonl")
        asked[name] = by_task[None]
    return asked
