# SPDX-License-Identifier: Apache-2.0
r"""What a run of the recipe did, in a form that another run can be compared with.

    python log.py FOLDER > log.json              # of what is in FOLDER
    python log.py FOLDER --compare log.json      # how far FOLDER agrees with a log

A run that was stopped early is compared as far as it came: 5 minutes of `recipe.sh` are enough
for the first prompts. Everything is seeded, but not all of it need be equal on another processor:
its sums are rounded otherwise, and where two tokens are nearly as probable, the other one may be
drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vllm_redrafter.data.dataset import DatasetInfo

PROMPTS_PER_DIGEST = 100
STEPS_PER_LOSS = 10
LOSS_TOLERANCE = 0.02
"""Relative: sums of other numbers of threads are rounded otherwise."""


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def prompts(folder: Path) -> Iterator[str]:
    """One digest for every hundred prompts."""
    path = folder / "prompts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = len(lines) - len(lines) % PROMPTS_PER_DIGEST
    for start in range(0, whole, PROMPTS_PER_DIGEST):
        yield digest([json.loads(line) for line in lines[start : start + PROMPTS_PER_DIGEST]])


def answers(folder: Path) -> Iterator[str]:
    """One digest for every shard, as far as they are finished in a row."""
    for number, shard in enumerate(DatasetInfo.finished_shards(folder)):
        if shard != number:
            return
        rows = parquet.read_table(folder / f"shard-{shard:05d}.parquet", columns=["input_ids"])
        yield digest(rows["input_ids"].to_pylist())


def losses(folder: Path) -> Iterator[float]:
    """The mean of every ten steps."""
    if not folder.exists():
        return
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    values = [event.value for event in events.Scalars("loss")]
    for start in range(0, len(values) - STEPS_PER_LOSS + 1, STEPS_PER_LOSS):
        yield round(sum(values[start : start + STEPS_PER_LOSS]) / STEPS_PER_LOSS, 4)


def log_of(folder: Path) -> dict[str, list[Any]]:
    return {
        "prompts": list(prompts(folder)),
        **{part: list(answers(folder / part)) for part in ("sampled", "greedy", "greedy-2")},
        "losses": list(losses(folder / "drafter" / "logs")),
    }


def compare(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> bool:
    """Print how far each part agrees; did all that there is?"""
    agrees = True
    for part, values in found.items():
        close: Callable[[Any, Any], bool] = (
            (lambda a, b: abs(a - b) <= LOSS_TOLERANCE * b)
            if part == "losses"
            else (lambda a, b: a == b)
        )
        equal = sum(close(a, b) for a, b in zip(values, expected[part], strict=False))
        print(f"{part}: {equal} of {len(values)} as in the log, which has {len(expected[part])}")
        agrees &= equal == len(values)
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where recipe.sh worked")
    parser.add_argument("--compare", type=Path, metavar="LOG", help="a log of another run")
    args = parser.parse_args()
    found = log_of(args.folder)
    if args.compare is None:
        print(json.dumps(found, indent=1))
    elif not any(found.values()):
        sys.exit(f"{args.folder}: nothing there to compare yet")
    elif not compare(found, json.loads(args.compare.read_text())):
        sys.exit(1)


if __name__ == "__main__":
    main()
