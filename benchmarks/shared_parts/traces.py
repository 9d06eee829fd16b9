"""What a trace of vLLM's torch profiler says of a GPU: its kernels, and whose steps they are."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

STEP = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
"""vLLM's name of a target's pass: requests whose prompts it reads and their rows, then others'."""

WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Step:
    """One step on the GPU, from the begin of the target's pass to that of the next one's.

    Attributes:
        prompts, prompt_rows: requests whose prompts are read, and how many rows of them.
        decoding, decoding_rows: the other requests, and their rows.
        period: milliseconds that it lasts; None of a trace's last step.
        busy: milliseconds in which the GPU computes or copies.
        forward: of them, those of the target's pass.
    """

    prompts: int
    prompt_rows: int
    decoding: int
    decoding_rows: int
    period: float | None
    busy: float
    forward: float


def read_events(trace: Path) -> list[dict[str, Any]]:
    """All events of a trace; times are in microseconds."""
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def busiest(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels by the time that all of their calls took, most first."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            name = event["name"]
            kernel = found.setdefault(name, {"name": name, "calls": 0, "ms": 0.0})
            kernel["calls"] += 1
            kernel["ms"] += event["dur"] / 1000
    return sorted(found.values(), key=lambda kernel: -kernel["ms"])


def host_calls(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """vLLM's own operations that the host called, and how long such a call usually took it.

    In a full graph there are none: these are of steps whose layers are called from Python.
    """
    took: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith("vllm::"):
            took.setdefault(event["name"], []).append(event["dur"])
    return [
        {"name": name, "calls": len(times), "median_us": round(median(times), 1)}
        for name, times in sorted(took.items())
    ]


def steps(events: Sequence[dict[str, Any]]) -> list[Step]:
    """The steps of a trace, in their order."""
    passes = [
        (event["ts"], event["ts"] + event["dur"], *map(int, found.groups()))
        for event in events
        if event.get("cat") == "gpu_user_annotation" and (found := STEP.fullmatch(event["name"]))
    ]
    passes.sort()
    work = [
        (event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in WORK
    ]
    made = []
    for number, (begin, end, *requests_and_rows) in enumerate(passes):
        following = passes[number + 1][0] if number + 1 < len(passes) else None
        until = float("inf") if following is None else following
        of_step = [(a, b) for a, b in work if begin <= a < until]
        made.append(
            Step(
                *requests_and_rows,
                period=None if following is None else (following - begin) / 1000,
                busy=covered(of_step) / 1000,
                forward=covered((a, b) for a, b in of_step if a < end) / 1000,
            )
        )
    return made


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what these intervals cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
