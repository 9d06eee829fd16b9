r"""What one ReDrafter step costs over one plain decoding step, on a GPU.

    python benchmarks/step_cost.py --output results.json
    python benchmarks/step_cost.py --targets llama-7b --nodes 32 --batches 1 --contexts 512
    python benchmarks/step_cost.py --floor    # without a GPU: what a step must cost at least

Targets have the shapes of real models and random weights (`load_format=dummy`), drafters likewise:
a step's time depends on shapes, not on values, and almost nothing is accepted, so contexts stay
what they are. Every target and K has an engine of its own, in a fresh process, with CUDA graphs.

Times are CUDA events', medians over --steps steps after a warm-up. A step lasts from its begin to
the next one's; `gap` is what its parts leave, mostly the device's waiting for the host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import get_args

from rich.console import Console
from shared_parts import machine, results
from shared_parts.arguments import beams, positive, results_file, script_parser
from step_cost_parts.floor import Device, Weights, draft_launches, floors, print_floors
from step_cost_parts.jobs import SHAPES, Job, jobs
from step_cost_parts.report import Cost, as_json, print_report

from vllm_redrafter.config import HeadDtype


def parser() -> argparse.ArgumentParser:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--targets", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--nodes", nargs="+", type=positive, default=[8, 16, 32, 64], help="K (default 8 ... 64)")
    add("--batches", nargs="+", type=positive, default=[1, 8, 32])
    add("--contexts", nargs="+", type=positive, default=[512, 4096])
    add("--beams", type=beams, default=(16, 5), metavar="WxL", help="(default 16x5)")
    add("--draft-vocab-size", type=positive, help="of the drafters (default: the target's)")
    add("--head-dtype", choices=get_args(HeadDtype), default="auto", help="(default auto)")
    add("--floor", action="store_true", help="bytes over bandwidth, and launches; nothing is run")
    add("--bandwidth", type=float, default=4.8, help="for floors, TB/s (default 4.8, an H200's)")
    add("--rate", type=float, default=989, help="for floors, bf16 TFLOP/s (default 989, likewise)")
    launches = "for floors, of a draft (default: those of the CUDA engine, 38 for 5 tokens)"
    add("--launches", type=positive, help=launches)
    add("--launch-time", type=float, default=2.0, help="for floors, µs each (default 2, assumed)")
    add("--steps", type=positive, default=100, help="timed, per case (default 100)")
    add("--output", type=results_file, help="write all measurements to this JSON file")
    add("--job", type=Path, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.job is not None:
        from step_cost_parts.engine import measure

        job = Job(**json.loads(options.job.read_text()))
        print(json.dumps([asdict(cost) for cost in measure(job)]))
        return 0
    console = Console()
    if options.floor:
        report_floors(options, console)
        return 0
    import torch

    if not torch.cuda.is_available():
        print(
            "step_cost.py times CUDA graphs on a GPU, and torch finds none here; nothing is "
            "measured. --floor needs none; on a CPU, benchmarks/throughput.py compares whole runs.",
            file=sys.stderr,
        )
        return 2
    surroundings = machine.describe(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as name:
        costs = [
            cost for job in jobs(options, Path(name)) for cost in in_own_process(job, Path(name))
        ]
    print_report(costs, console)
    report_floors(options, console)
    results.write(options.output, {**surroundings, "steps": as_json(costs)})
    return 0


def report_floors(options: argparse.Namespace, console: Console) -> None:
    """A table per target: the least that its steps cost on the device that the options tell."""
    device = Device(options.bandwidth * 1e12, options.rate * 1e12)
    cases = list(product(options.batches, options.contexts))
    for target in options.targets:
        shape = SHAPES[target]
        weights = Weights.of(shape, options.draft_vocab_size, options.head_dtype)
        launches = options.launches or draft_launches(options.beams[1])
        seconds = launches * options.launch_time * 1e-6
        found = floors(shape, weights, device, options.beams, options.nodes, cases, seconds)
        print_floors(target, found, console)


def in_own_process(job: Job, folder: Path) -> list[Cost]:
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(job)))
    # Without an empty entry, which would be the current folder.
    path = [
        str(Path(__file__).parent),
        *filter(None, os.getenv("PYTHONPATH", "").split(os.pathsep)),
    ]
    environment = {
        **os.environ,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc with a function
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # The workers unpickle the clock's functions by its module's name.
        "PYTHONPATH": os.pathsep.join(path),
    }
    done = subprocess.run(
        [sys.executable, __file__, "--job", str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Cost(**cost) for cost in json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    sys.exit(main())
