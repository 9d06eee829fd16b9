"""benchmarks/tree_attention.py --tune, with a stopwatch that invents times.

To be run as a module, in a process of its own that Triton's interpreter was chosen for: what is
tried is compared with the reference there, and not launched again to be timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tree_attention
from rich.console import Console
from shared_parts import gpu
from shared_parts.timing import Timing
from torch import Tensor
from tree_attention_parts import candidates, trials
from tree_attention_parts import tune as tune_module
from tree_attention_parts.candidates import TunedShape, tile_neighbours
from tree_attention_parts.cases import Heads
from tree_attention_parts.measure import Settings
from tree_attention_parts.tune import Sweep, Table, tune

from redrafter_testing.benchmarks.tree_attention_results import CPU
from vllm_redrafter.triton_kernels.tree_attention_tiles import Tile

NAME = "Imaginary GPU 9000"
# Of 2 nodes under 8 heads: Triton's interpreter has a program for each.
SHAPE = TunedShape(Heads("tiny", query=8, kv=1, dim=64), rows=16)
BROKEN_WARPS = 8
"""Tiles of so many warps give wrong results."""


class Stopwatch:
    """Longer K tiles are faster, fewer warps on top of it; parts of fewer keys; 7 stages fail."""

    name = NAME
    device = CPU
    free_bytes = 10_000_000

    def __init__(self) -> None:
        self.timed: list[Any] = []

    def in_graph(self, launch: Callable[[], object]) -> Timing:
        tuning = trials.kernels.tuning_of(CPU)
        tile = tuning.tiles[SHAPE.key]
        self.timed.append([tile.keys, tile.num_warps, tile.num_stages, tuning.aims.min_keys])
        if tile.num_stages == 7:
            raise RuntimeError("out of resource: shared memory")
        speed = tile.keys * (1.5 if tile.num_warps == 2 else 1) * 256 / tuning.aims.min_keys
        return Timing([6400 / speed, 6400 / speed, 1e9])

    def describe(self) -> dict[str, str]:
        return {"driver": "none"}


def some_neighbours(tile: Tile, head_dim: int) -> list[Tile]:
    """Without those whose rows and registers differ, for the sake of time."""
    return [
        other
        for other in tile_neighbours(tile, head_dim)
        if (other.rows, other.max_registers) == (tile.rows, tile.max_registers)
    ]


def breaking(launch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def launched(*args: Any, **kwargs: Any) -> Tensor:
        found = launch(*args, **kwargs)
        tile = trials.kernels.tuning_of(CPU).tiles[SHAPE.key]
        return 2 * found if tile.num_warps == BROKEN_WARPS else found

    return launched


def tune_something(folder: Path) -> None:
    """Write the tables and what was timed into files of the folder, for tests to read."""
    stopwatch = Stopwatch()
    # The second context's caches do not fit into the memory that there is.
    sweep = Sweep([SHAPE], [2], [20, 40_000], dtype=torch.float16, aims_shape=SHAPE)
    table = Table({"date": "a day"}, NAME, 0, folder / "tiles.json")
    with (
        (folder / "tune.txt").open("w") as file,
        patch.object(tune_module, "AIMS_CHECK_CONTEXT", 40),
        patch.object(tune_module, "CONTEXT", 40),
        patch.object(tune_module, "tile_neighbours", some_neighbours),
        patch.object(trials.kernels, "tree_attention", breaking(trials.kernels.tree_attention)),
    ):
        complete = tune(stopwatch, sweep, Settings(), table, Console(file=file, width=200))
    (folder / "timed.json").write_text(json.dumps({"complete": complete, "cells": stopwatch.timed}))

    args = tree_attention.parser().parse_args(
        [
            *("--tune", "--batches", "1", "--contexts", "30", "--rounds", "1", "--repeats", "1"),
            *("--output", str(folder / "options.json")),
        ]
    )
    with (
        patch.object(gpu, "Gpu", lambda repeats: Stopwatch()),
        patch.object(candidates, "tuned_shapes", lambda: [SHAPE]),
        patch.object(tune_module, "wrong", lambda *args, **kwargs: None),
        patch.object(tune_module, "reference", lambda inputs: None),
    ):
        assert tree_attention.on_gpu(args)


if __name__ == "__main__":
    tune_something(Path(sys.argv[1]))
