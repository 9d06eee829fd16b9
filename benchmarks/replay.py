r"""What the batch's budget would yield on a GPU: arithmetic over recorded drafts, nothing is run.

    python benchmarks/replay.py --case NAME TARGET DRAFTER DATA --held-out 64 --plot out.png

A drafter searches at every token of the text in DATA (a folder of generate-data), which TARGET
wrote; so it is known which nodes would have been accepted. Decoding is replayed with many requests
in flight, in fixed shapes and by the engines' own budget (vllm_redrafter/budget), which decides
from calibrated probabilities as it would there. The clock is step_cost.py's floor: bytes over
bandwidth or operations over rate, of a target and a drafter with the sizes of a large model. So
the text says what is accepted, and arithmetic what it costs: no GPU reaches its floor, and the
large model's drafter would be another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from replay_parts.report import Result, as_json, plot, print_results
from replay_parts.simulation import Adaptive, Batch, Fixed, Graphs, Longest, replay
from replay_parts.traces import Traces, record
from rich.console import Console
from shared_parts import machine, results
from shared_parts.arguments import positive, script_parser, tree_shape
from step_cost_parts.floor import Arithmetic, Device, Weights
from step_cost_parts.jobs import SHAPES

from vllm_redrafter import ConfigError, ReDrafterConfig
from vllm_redrafter.training.evaluation import load_material
from vllm_redrafter.training.training_config import EvaluationConfig
from vllm_redrafter.tree.policy import search_tiers

LEAST_STEPS = 200
KINDS = {"adaptive": Adaptive, "longest": Longest, "lengths": Graphs}
"""By name; others are fixed shapes."""


def parser() -> argparse.ArgumentParser:
    made = script_parser(__doc__)
    add = made.add_argument
    add(
        "--case",
        nargs=4,
        action="append",
        required=True,
        metavar=("NAME", "TARGET", "DRAFTER", "DATA"),
        help="a text: its name, who wrote it, who drafts, and where it is; may be repeated",
    )
    add("--held-out", type=positive, help="conversations that train left out (default: all)")
    add("--seed", type=int, default=0, help="of train, and of the order of answers (default 0)")
    add("--costs-of", choices=SHAPES, default="llama-3-8b", help="(default llama-3-8b)")
    add("--draft-vocab-size", type=positive, default=32768, help="for costs (default 32768)")
    add("--context", type=positive, default=512, help="for costs, per request (default 512)")
    add("--bandwidth", type=float, default=4.8, help="for costs, TB/s (default 4.8, an H200's)")
    add("--rate", type=float, default=989, help="for costs, bf16 TFLOP/s (default 989, likewise)")
    launches = "for costs, of each of a draft's kernels, µs (default 0; step_cost.py assumes 2)"
    add("--launch-time", type=float, default=0.0, help=launches)
    add("--requests", nargs="+", type=positive, default=[2**k for k in range(9)])
    add(
        "--fixed",
        nargs="+",
        type=tree_shape,
        metavar="WxL:K",
        default=[(4, 4, 4), (4, 4, 12), (8, 4, 32)],
        help="(default 4x4:4 4x4:12 8x4:32)",
    )
    add("--adaptive", type=tree_shape, default=(8, 4, 32), metavar="WxL:K", help="maxima")
    lengths = "the CUDA engine's budget besides, with drafts of several lengths and of one"
    add("--lengths", action="store_true", help=lengths)
    add("--samples", type=positive, default=4000, help="requests × steps per figure (default 4000)")
    add("--output", type=Path, help="write all figures to this JSON file")
    add("--plot", type=Path, help="draw the ratios to this PNG file")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(arguments)
    try:
        methods = methods_of(options)
        found = [
            result
            for name, *where in options.case
            for result in compared(name, traced(options, where, methods), options, methods)
        ]
    except ConfigError as error:
        command.error(str(error))
    print_results(found, Console())
    record = {**machine.describe(None), "settings": settings(options), "results": as_json(found)}
    results.write(options.output, record)
    if options.plot:
        plot(found, title(options), options.plot)
    return 0


def methods_of(options: argparse.Namespace) -> dict[str, ReDrafterConfig]:
    """By name: the fixed shapes, and the maxima of the adaptive one."""
    fixed = {
        f"{width}x{length}:{nodes}": ReDrafterConfig(nodes, width, length, adaptive=False)
        for width, length, nodes in options.fixed
    }
    width, length, nodes = options.adaptive
    adaptive = ReDrafterConfig(nodes, width, length)
    names = ("longest", "lengths", "adaptive") if options.lengths else ("adaptive",)
    return {**fixed, **dict.fromkeys(names, adaptive)}


def traced(
    options: argparse.Namespace, where: Sequence[str], methods: dict[str, ReDrafterConfig]
) -> Traces:
    """All searches that a method may ask for."""
    target, drafter, data = where
    config = EvaluationConfig(held_out=options.held_out, seed=options.seed)
    material = load_material(target, drafter, (Path(data),), config)
    widths = {
        tier.beam_width
        for shape in methods.values()
        for tier in search_tiers(shape, shape.num_speculative_tokens)
    }
    length = max(shape.beam_length for shape in methods.values())
    return record(material.drafter, material.target, material.rows, widths, length)


def compared(
    case: str, traces: Traces, options: argparse.Namespace, methods: dict[str, ReDrafterConfig]
) -> Iterator[Result]:
    """Every method at every number of requests."""
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    shape = SHAPES[options.costs_of]
    device = Device(options.bandwidth * 1e12, options.rate * 1e12)
    least = Arithmetic(shape, Weights.of(shape, options.draft_vocab_size), device)
    for requests in options.requests:
        batch = Batch(least, requests, options.context, options.launch_time * 1e-6)
        steps = max(LEAST_STEPS, options.samples // requests)
        for name, config in methods.items():
            made = KINDS.get(name, Fixed)
            method = made(traces, batch, config)
            yielded = replay(method, traces.left, requests, steps // 4, steps, options.seed)
            calibration = method.calibration if isinstance(method, Adaptive) else None
            yield Result(case, name, requests, batch.plain_rate, yielded, calibration)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without this machine's paths."""
    left_out = ("case", "output", "plot")
    return {
        "cases": [name for name, *_ in options.case],
        **{name: value for name, value in vars(options).items() if name not in left_out},
    }


def title(options: argparse.Namespace) -> str:
    return (
        f"Arithmetic, nothing run: {options.costs_of}, {options.context} tokens of context,\n"
        f"at {options.bandwidth:g} TB/s and {options.rate:g} TFLOP/s"
    )


if __name__ == "__main__":
    sys.exit(main())
