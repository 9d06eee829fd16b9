"""Medians of calls that are timed in turn, and what the machine reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

READ_BYTES = 1 << 28
"""Read to measure the bandwidth: more than caches hold."""


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def read_bandwidth() -> float:
    """Bytes per second that this process reads, the best of a few sums over a large tensor."""
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / min(seconds(memory.sum) for _ in range(5))


def medians(parts: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds of each call; a repeat makes them one after another."""
    for call in parts.values():  # first calls allocate
        call()
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, call in parts.items():
            times[name].append(1000 * seconds(call))
    return {name: median(values) for name, values in times.items()}
