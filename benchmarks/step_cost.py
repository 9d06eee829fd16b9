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
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import machine
from rich.console import Console
from step_cost_floor import Device, Weights, floors, print_floors
from step_cost_report import Cost, as_json, print_report

SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
}
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Job:
    """One engine's: a target, K (0 for plain decoding), and the batches and contexts to time."""

    target: str
    folder: str
    drafter: str
    nodes: int
    beam_width: int
    beam_length: int
    cases: list[tuple[int, int]]
    steps: int


def parser() -> argparse.ArgumentParser:
    summary, details = (__doc__ or "").split("\n", 1)
    made = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--targets", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--nodes", nargs="+", type=_positive, default=[8, 16, 32, 64], help="K (default 8 ... 64)")
    add("--batches", nargs="+", type=_positive, default=[1, 8, 32])
    add("--contexts", nargs="+", type=_positive, default=[512, 4096])
    add("--beams", type=_beams, default=(16, 5), metavar="WxL", help="(default 16x5)")
    add("--draft-vocab-size", type=_positive, help="of the drafters (default: the target's)")
    add("--floor", action="store_true", help="bytes over bandwidth alone; nothing is run")
    add("--bandwidth", type=float, default=4.8, help="for floors, TB/s (default 4.8, an H200's)")
    add("--rate", type=float, default=989, help="for floors, bf16 TFLOP/s (default 989, likewise)")
    add("--steps", type=_positive, default=100, help="timed, per case (default 100)")
    add("--output", type=Path, help="write all measurements to this JSON file")
    add("--job", type=Path, help=argparse.SUPPRESS)
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def _beams(text: str) -> tuple[int, int]:
    width, _, length = text.partition("x")
    return _positive(width), _positive(length)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.job is not None:
        print(
            json.dumps(
                [asdict(cost) for cost in measure(Job(**json.loads(options.job.read_text())))]
            )
        )
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
    if options.output:
        options.output.write_text(json.dumps({**surroundings, "steps": as_json(costs)}, indent=1))
    return 0


def report_floors(options: argparse.Namespace, console: Console) -> None:
    """A table per target: the least that its steps cost on the device that the options tell."""
    device = Device(options.bandwidth * 1e12, options.rate * 1e12)
    cases = list(product(options.batches, options.contexts))
    for target in options.targets:
        shape = SHAPES[target]
        weights = Weights.of(shape, options.draft_vocab_size)
        found = floors(shape, weights, device, options.beams, options.nodes, cases)
        print_floors(target, found, console)


def jobs(options: argparse.Namespace, folder: Path) -> list[Job]:
    """Plain decoding and every K, for each target, whose folders are written."""
    width, length = options.beams
    made = []
    for target in options.targets:
        drafter = write_drafter(target, folder, options.draft_vocab_size)
        paths = write_target(target, folder), drafter
        cases = list(product(options.batches, options.contexts))
        for nodes in (0, *options.nodes):
            made.append(Job(target, *map(str, paths), nodes, width, length, cases, options.steps))
    return made


def write_target(target: str, folder: Path) -> Path:
    """A config.json: vLLM makes the weights up."""
    from transformers import LlamaConfig

    path = folder / target
    config = LlamaConfig(**SHAPES[target], max_position_embeddings=131072, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    return path


def write_drafter(target: str, folder: Path, draft_vocab_size: int | None) -> Path:
    import torch

    from vllm_redrafter import Drafter, DrafterConfig, save_drafter

    path = folder / f"{target}-drafter"
    hidden = SHAPES[target]["hidden_size"]
    config = DrafterConfig(
        SHAPES[target]["vocab_size"], hidden, hidden, draft_vocab_size=draft_vocab_size
    )
    save_drafter(Drafter(config).to(torch.bfloat16), path)
    return path


def in_own_process(job: Job, folder: Path) -> list[Cost]:
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(job)))
    environment = {
        **os.environ,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc with a function
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # The workers unpickle the clock's functions by its module's name.
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.getenv("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, __file__, "--job", str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Cost(**cost) for cost in json.loads(done.stdout.splitlines()[-1])]


def measure(job: Job) -> list[Cost]:
    """In the engine's process: all cases of a job."""
    import step_cost_clock
    from vllm import LLM

    llm = LLM(job.folder, **engine_arguments(job))
    llm.collective_rpc(step_cost_clock.install)
    costs = []
    for requests, context in job.cases:
        steps = timed_steps(llm, job, requests, context)
        costs.append(Cost.of(job.target, job.nodes, requests, context, steps))
    return costs


def engine_arguments(job: Job) -> dict[str, Any]:
    most = max(context for _, context in job.cases)
    batches = {requests for requests, _ in job.cases}
    # Each step adds one token at least, and needs room for a tree.
    room = WARM_UP_STEPS + job.steps + 3 * (job.nodes + 1)
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_model_len": most + room,
        "max_num_seqs": max(batches),
        # Graphs for what is timed alone: decoding steps, by tokens, and drafts, by requests.
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(batches | {b * (job.nodes + 1) for b in batches}),
        },
    }
    if job.nodes:
        arguments["speculative_config"] = {
            "model": job.drafter,
            "num_speculative_tokens": job.nodes,
            "beam_width": job.beam_width,
            "beam_length": job.beam_length,
        }
    return arguments


def timed_steps(llm: Any, job: Job, requests: int, context: int) -> list[dict[str, float]]:
    """The steps of one run, those of the warm-up left out."""
    import step_cost_clock
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=WARM_UP_STEPS + job.steps,
        ignore_eos=True,
        detokenize=False,
    )
    vocabulary = SHAPES[job.target]["vocab_size"]
    prompts = [
        {"prompt_token_ids": [(7919 * (i + 1) * (t + 1)) % vocabulary for t in range(context)]}
        for i in range(requests)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    (steps,) = llm.collective_rpc(step_cost_clock.read, args=(requests,))
    if len(steps) <= WARM_UP_STEPS:
        raise RuntimeError(
            f"batch {requests}, context {context}: only {len(steps)} decoding steps of the whole "
            "batch were seen; raise --steps"
        )
    return steps[WARM_UP_STEPS:]


if __name__ == "__main__":
    sys.exit(main())
