# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels, timed beside the bytes that they have to read or write at least.

Whether they compute the right thing, `tests/triton_kernels` says, which run on a GPU too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from shared_parts import machine, results
from shared_parts.gpu import Gpu


@dataclass(frozen=True)
class Timed:
    """What was timed."""

    launch: str
    case: str
    floor_bytes: int
    microseconds: float

    @property
    def gb_per_s(self) -> float:
        return self.floor_bytes / self.microseconds / 1000


def run(
    command: argparse.ArgumentParser,
    options: argparse.Namespace,
    measured: Callable[[Gpu, argparse.Namespace], Iterable[Timed]],
) -> None:
    """Time what `measured` makes, print it, and write it after each; ends without a GPU."""
    if not torch.cuda.is_available():
        command.error("torch finds no GPU, and nothing is timed without one")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        command.error("TRITON_INTERPRET is set: this would time the interpreter; unset it")
    gpu = Gpu(options.repeats)
    copy = gpu.copy_bandwidth()
    record: dict[str, Any] = {**machine.describe(gpu.name), **gpu.describe()}
    record |= {"repeats": options.repeats, "copy_gb_per_s": copy, "launches": []}
    found = []
    for timed in measured(gpu, options):
        found.append(timed)
        record["launches"].append(asdict(timed))
        results.write(options.output, record)
    results.wide_console().print(table(found, copy))


def table(found: Iterable[Timed], copy: float) -> Table:
    """The figures, for a person."""
    made = Table("launch", "case", title=f"A copy on the device: {copy:.0f} GB/s")
    for column in ("µs", "floor, µs", "GB/s", "of a copy's"):
        made.add_column(column, justify="right")
    for timed in found:
        made.add_row(
            timed.launch,
            timed.case,
            f"{timed.microseconds:.1f}",
            f"{timed.floor_bytes / copy / 1000:.1f}",
            f"{timed.gb_per_s:.0f}",
            f"{timed.gb_per_s / copy:.0%}",
        )
    return made
