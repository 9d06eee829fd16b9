# SPDX-License-Identifier: Apache-2.0
"""Jobs of an engine, its runs and their measurements, made up: for tests of throughput.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from throughput_parts.engine import Generation, Job, Run
from throughput_parts.report import Measurement, Row, summarise

PARTS = {
    "steps": 40,
    "verifications": 80,
    "drafted_tokens": 360,
    "draft": 0.1,
    "forward": 0.5,
    "attention": 0.2,
    "accept": 0.05,
    "compact": 0.01,
}
UNDRAFTED = {"undrafted_steps": 10}
"""What the engine counts besides, where it chooses the budget itself."""


def fake_job(folder: Path, **behaviour: str) -> Job:
    """For the engine of fake_engine.py, whose docstring says what it can be told."""
    engine = {"speculative_config": None, "folder": str(folder), **behaviour}
    return Job(engine, 0, [[1]], None, 8, False, False, [None])


def run(seconds: float, outputs: list[list[int]], **changes: Any) -> Run:
    made = Generation(outputs, seconds, steps=4, request_steps=8)
    values: dict[str, Any] = {"concurrency": 2, "temperature": 0.0, "parts": None, **changes}
    return Run(generation=made, spec_decode={}, **values)


def measured(method: str = "plain", shape: str = "", **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "repeat": 0,
        "concurrency": 2,
        "temperature": 0.0,
        "seconds": 1.0,
        "requests": 2,
        "output_tokens": 100,
        "steps": 50,
        "request_steps": 100,
        "repeated_ngrams": 0.25,
        "identical": None if method == "plain" else 2,
        "spec_decode": {},
        "parts": None if method in ("plain", "ngram") else PARTS,
    }
    return Measurement(method, shape, **{**values, **changes})


def several_rows() -> list[Row]:
    made = []
    for temperature in (0.0, 0.7):
        for level in (1, 8):
            at = {"temperature": temperature, "concurrency": level}
            made += [
                measured(**at),
                measured("ngram", "5", seconds=0.8, **at),
                measured("ReDrafter", "2x4:6", seconds=0.5, identical=1, **at),
                measured("ReDrafter", "1x3:3", seconds=0.4, **at),
                measured("ReDrafter", "1x3:3", repeat=1, seconds=0.6, **at),
                measured("adaptive", "4x5:12", seconds=0.5, parts=PARTS | UNDRAFTED, **at),
                measured("adaptive", "4x5:12", repeat=1, seconds=0.5, **at),
                measured(repeat=1, **at),
            ]
    return summarise(made)
