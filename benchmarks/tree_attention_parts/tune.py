"""--tune: which tiles, and which aims of the plan for parts, are the fastest on this GPU.

From the usual choice to those that differ from it in one number; from the fastest of these to its
own neighbours, as long as there are rounds left and something is gained. What is tried is compared
with the float64 reference before it is timed.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from shared_parts import results

from tree_attention_parts.candidates import TunedShape, aims_neighbours, tile_neighbours
from tree_attention_parts.cases import HEADS, Case, TreeShape
from tree_attention_parts.check import CONTEXT, reference
from tree_attention_parts.measure import Settings, Stopwatch
from tree_attention_parts.problem import make_problem
from tree_attention_parts.search import Search, Times
from tree_attention_parts.trials import one_long, planned_for, timed, wrong
from vllm_redrafter.triton_kernels.tree_attention_plan import AIMS, PartAims
from vllm_redrafter.triton_kernels.tree_attention_tiles import (
    NOT_TUNED,
    Tile,
    choose_tile,
    compute_capability,
)
from vllm_redrafter.triton_kernels.tree_attention_tuning import FOLDER, Tuning, file_name

FP8_CAPABILITY = 89
"""From which on Triton compiles fp8 e4m3."""

AIMS_CHECK_CONTEXT = 1500
"""Long enough for some parts."""

AIMS_SHAPE = TunedShape(HEADS["llama-3-8b"], rows=128)


@dataclass(frozen=True)
class Sweep:
    """What is tried.

    Attributes:
        shapes: whose tiles are looked for.
        batches, contexts: each combination is a case that is timed.
        rounds: of neighbours.
        dtype: of queries and caches.
        aims_shape: what the aims are looked for with.
    """

    shapes: Sequence[TunedShape]
    batches: Sequence[int]
    contexts: Sequence[int]
    rounds: int = 2
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    seed: int = 0
    aims_shape: TunedShape = AIMS_SHAPE

    def case(
        self, shape: TunedShape, batch: int, context: int, nodes: TreeShape | None = None
    ) -> Case:
        """With the shape's trees where no others are named."""
        return Case(
            shape.heads,
            batch,
            context,
            nodes or shape.nodes,
            self.dtype,
            block_size=self.block_size,
            seed=self.seed,
        )

    def cases(self, shape: TunedShape) -> list[Case]:
        return [self.case(shape, b, c) for b in self.batches for c in self.contexts]


@dataclass
class Table:
    """What `read_tuning` reads, with the times that it rests on; on disk after each entry.

    Attributes:
        surroundings: machine, versions, options.
        device: the GPU's name.
        path: None to keep it to oneself.
        tiles: entries.
        parts: None until aims were looked for.
        skipped: cases that were not timed, and why.
    """

    surroundings: dict[str, Any]
    device: str
    capability: int
    path: Path | None = None
    tiles: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, Any] | None = None
    skipped: list[str] = field(default_factory=list)

    def save(self) -> None:
        results.write(self.path, self.as_json())

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "tree_attention --tune",
            **self.surroundings,
            "device": self.device,
            "capability": self.capability,
            "triton": triton.__version__,
            "tiles": self.tiles,
            "parts": self.parts,
            "skipped": self.skipped,
        }


def tune(
    stopwatch: Stopwatch, sweep: Sweep, settings: Settings, table: Table, console: Console
) -> bool:
    """Fill the table; whether there is a time for every shape, and for the aims.

    The aims come after the first head size: a sweep that is cut short has the most usual things.
    """
    complete = True
    table.save()
    first = sweep.shapes[0].heads.dim
    usual = [shape for shape in sweep.shapes if shape.heads.dim == first]
    others = [shape for shape in sweep.shapes if shape.heads.dim != first]
    for shape in usual:
        complete &= tune_tile(stopwatch, sweep, shape, settings, table, console)
    complete &= tune_aims(stopwatch, sweep, settings, table, console)
    for shape in others:
        complete &= tune_tile(stopwatch, sweep, shape, settings, table, console)
    console.print(
        f"\nTo use the table, copy it to triton_kernels/{FOLDER.name}/{file_name(table.device)}",
        markup=False,
    )
    return complete


def tune_tile(
    stopwatch: Stopwatch,
    sweep: Sweep,
    shape: TunedShape,
    settings: Settings,
    table: Table,
    console: Console,
) -> bool:
    """Look for one shape's tile; whether there is a time."""
    device = stopwatch.device
    trial = make_problem(sweep.case(shape, 2, CONTEXT), device).tree
    expected = reference(trial)

    def tuning(tile: Tile) -> Tuning:
        return Tuning({shape.key: tile}, AIMS)

    def confirm(tile: Tile) -> str | None:
        """With an fp8 cache, which takes more registers, and without parts."""
        problem = wrong(trial, expected, tuning(tile), parts=1)
        if problem or 0 < compute_capability(device) < FP8_CAPABILITY:
            return problem
        eighth = trial._replace(
            key_cache=trial.key_cache.to(torch.float8_e4m3fn),
            value_cache=trial.value_cache.to(torch.float8_e4m3fn),
        )
        problem = wrong(eighth, reference(eighth), tuning(tile), parts=3)
        return None if problem is None else f"with an fp8 cache: {problem}"

    search = Search[Tile](
        usual=choose_tile(shape.rows, shape.heads.dim, sweep.dtype, compute_capability(device)),
        # In parts, as most launches are.
        check=lambda tile: wrong(trial, expected, tuning(tile), parts=3),
        confirm=confirm,
        measure=lambda tiles: timed(
            stopwatch, sweep.cases(shape), settings, table.skipped, {t: tuning(t) for t in tiles}
        ),
    )
    chosen = search.run(lambda t: tile_neighbours(t, shape.heads.dim), sweep.rounds)
    if chosen is not None:
        size, dim, rows = shape.key
        where = {"element_bytes": size, "head_dim": dim, "rows": rows}
        table.tiles.append({**where, "tile": asdict(chosen), **search.as_json(chosen)})
    console.print(f"{shape}: {search.said(chosen)}", markup=False)
    table.save()
    return chosen is not None


def tune_aims(
    stopwatch: Stopwatch, sweep: Sweep, settings: Settings, table: Table, console: Console
) -> bool:
    """Look for the plan's aims, with the tiles found so far; whether there is a time.

    All cases are planned for the longest context, as in an engine, whose graphs are captured before
    it is known which they get. Beside those of one length there are batches of short contexts with
    a single long one, which a part should not read alone.
    """
    tiles = {(e["element_bytes"], e["head_dim"], e["rows"]): Tile(**e["tile"]) for e in table.tiles}
    shape, longest, shortest = sweep.aims_shape, max(sweep.contexts), min(sweep.contexts)
    few_nodes = TreeShape.parse("4")
    trial = make_problem(sweep.case(shape, 2, AIMS_CHECK_CONTEXT, few_nodes), stopwatch.device).tree
    expected = reference(trial)

    def tuning(aims: PartAims) -> Tuning:
        return Tuning(tiles or NOT_TUNED, aims)

    def measure(candidates: Sequence[PartAims]) -> Times[PartAims]:
        tunings = {aims: tuning(aims) for aims in candidates}
        found = timed(
            stopwatch,
            sweep.cases(shape),
            settings,
            table.skipped,
            tunings,
            lambda inputs: planned_for(inputs, longest),
        )
        mixed = [
            sweep.case(shape, batch, longest)
            for batch in sweep.batches
            if batch > 1 and shortest < longest
        ]
        with_one_long = timed(
            stopwatch,
            mixed,
            settings,
            table.skipped,
            tunings,
            lambda inputs: one_long(inputs, shortest),
        )
        return found | {
            f"{case}, the others {shortest}": cells for case, cells in with_one_long.items()
        }

    search = Search[PartAims](
        usual=AIMS,
        check=lambda aims: wrong(trial, expected, tuning(aims)),
        confirm=lambda aims: None,
        measure=measure,
    )
    chosen = search.run(aims_neighbours, sweep.rounds)
    if chosen is not None:
        table.parts = {"aims": asdict(chosen), **search.as_json(chosen)}
    console.print(f"parts: {search.said(chosen)}", markup=False)
    table.save()
    return chosen is not None
