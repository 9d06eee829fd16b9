r"""What one ReDrafter step costs over one plain decoding step, on a GPU.

    python benchmarks/step_cost.py --output results.json
    python benchmarks/step_cost.py --targets llama-7b --nodes 32 --batches 1 --contexts 512
    python benchmarks/step_cost.py --floor --beams 4x5 --draft-vocab-size 32768

Targets have the shapes of real models and random weights (`load_format=dummy`), drafters likewise:
a step's time depends on shapes, not on values, and almost nothing is accepted, so contexts stay
what they are. Every target and K has an engine of its own, in a fresh process, with CUDA graphs.

Times are CUDA events', medians over --steps steps after a warm-up. A step lasts from its begin to
the next one's; `gap` is what its parts leave, mostly the device's waiting for the host.

`--floor` times nothing and needs no GPU: of each head it counts the launches of a draft for one
request, and the bytes of weights that they read.
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
from pathlib import Path

from rich.console import Console
from shared_parts import machine, results
from shared_parts.arguments import beams, positive, results_file, script_parser
from shared_parts.results import wide_console
from step_cost_parts.jobs import SHAPES, Job, jobs
from step_cost_parts.report import Cost, as_json, print_report

from vllm_redrafter.config import USUAL_CANDIDATES


def parser() -> argparse.ArgumentParser:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--targets", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--nodes", nargs="+", type=positive, default=[8, 16, 32, 64], help="K (default 8 ... 64)")
    add("--batches", nargs="+", type=positive, default=[1, 8, 32])
    add("--contexts", nargs="+", type=positive, default=[512, 4096])
    add("--beams", type=beams, default=(16, 5), metavar="WxL", help="(default 16x5)")
    add("--draft-vocab-size", type=positive, help="of the drafters (default: the target's)")
    add("--floor", action="store_true", help="count what drafts read and launch; needs no GPU")
    add("--candidates", type=positive, default=USUAL_CANDIDATES, help="of --floor (default 128)")
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
    if options.floor:
        return print_floor(options)
    import torch

    if not torch.cuda.is_available():
        print(
            "step_cost.py times CUDA graphs on a GPU, and torch finds none here; nothing is "
            "measured. On a CPU, benchmarks/throughput.py compares whole runs.",
            file=sys.stderr,
        )
        return 2
    surroundings = machine.describe(torch.cuda.get_device_name())
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory() as name:
        for job in jobs(options, Path(name)):
            costs += in_own_process(job, Path(name))
            # A later engine may run out of time.
            results.write(options.output, {**surroundings, "steps": as_json(costs)})
    print_report(costs, Console())
    return 0


def print_floor(options: argparse.Namespace) -> int:
    """Of every target's shape, with and without --draft-vocab-size."""
    from step_cost_parts.floor import floors, print_floors

    from vllm_redrafter.tree.policy import SearchShape

    console, shape, report = wide_console(), SearchShape(*options.beams), []
    for target in options.targets:
        vocabulary, hidden = SHAPES[target]["vocab_size"], SHAPES[target]["hidden_size"]
        for reduced in sorted({None, options.draft_vocab_size}, key=bool):
            ranked = vocabulary if reduced is None else reduced
            if ranked > vocabulary:
                continue
            found = floors(vocabulary, hidden, shape, options.candidates, reduced)
            title = f"{target}, {ranked:,} tokens, {options.candidates} candidates, one request"
            print_floors(title, found, console)
            report += [{"target": target, "ranked": ranked, **asdict(each)} for each in found]
    results.write(options.output, {**machine.describe(gpu=None), "floor": report})
    return 0


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
