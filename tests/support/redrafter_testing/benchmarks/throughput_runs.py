# SPDX-License-Identifier: Apache-2.0
"""Runs of an engine and their measurements, made up: for tests of throughput.py."""

from __future__ import annotations

from typing import Any

from throughput_parts.engine import Generation, Run
from throughput_parts.report import Measurement

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
