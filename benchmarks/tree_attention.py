"""Tree attention's time against memory's: how near the kernel is to reading K and V once.

    python benchmarks/tree_attention.py --output results.json
    python benchmarks/tree_attention.py --quick

A case is R requests with a context of n keys and a token tree each, bf16, K and V in scattered
blocks of 16. Trees come from a beam search over random distributions (`32`: the 32 best nodes it
explored; `8x5`: all nodes on 8 finished beams of 5 tokens). It is timed beside

    (a) one node: the same kernel with the roots alone, which is plain decoding;
    (b) beams apart: no dedup. The same kernel; the path to every leaf is a request of its own with
        its own copy of the block table, so the context is read once per beam. (The context's blocks
        are shared, as with prefix caching: the L2 cache can serve some of these reads.)

(b) has to give the tree's result, else its cell says so, as it does if it fails.

How: CUDA events around single launches from a CUDA graph, after a warm-up, medians over --repeats;
`launched` is the call from Python on an idle device. The L2 cache is flushed before every launch,
by reading a buffer of eight times its size, so that K and V come from memory.

The floor, printed before a case is timed, is bytes / copy bandwidth. Bytes: K and V of context and
tree once per KV head, queries and output, block table, bit sets. (Not counted: the lengths, and the
partial results of split keys, which are the kernel's own affair.) The copy bandwidth is that of a
large copy on the device in the same run, bytes read and written; attention nearly only reads, so
more than 100 % is possible.

Before anything is timed, kernels are compared with float64 references. Without a GPU this is all
that happens, on tiny cases in fp32, by Triton's interpreter (which gets products of bf16 wrong),
and nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from shared_parts import machine
from shared_parts.arguments import fraction, integer, positive, script_parser
from shared_parts.results import wide_console
from tree_attention_parts.cases import HEADS, Case, TreeShape

FULL: dict[str, Any] = {
    "batches": [1, 8, 64],
    "contexts": [512, 4096, 32768],
    "nodes": ["4", "16", "32", "64", "8x5"],
    "shapes": list(HEADS),
    "repeats": 50,
}
QUICK: dict[str, Any] = {
    **FULL,
    "batches": [8],
    "contexts": [4096],
    "nodes": ["32", "8x5"],
    "repeats": 20,
}


def parser() -> argparse.ArgumentParser:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--batches", nargs="+", type=positive, help="requests (default 1 8 64)")
    add("--contexts", nargs="+", type=positive, help="keys (default 512 4096 32768)")
    add(
        "--nodes",
        nargs="+",
        type=_tree_shape,
        metavar="N|WxL",
        help="nodes of a tree, root counted, or beams x tokens (default 4 16 32 64 8x5)",
    )
    add("--shapes", nargs="+", choices=list(HEADS), help="(default both)")
    add("--parts", type=integer(1, 128), help="num_parts of the tree's launches")
    add("--repeats", type=positive, help="launches timed (default 50)")
    add("--block-size", type=positive, default=16, help="keys per block (default 16)")
    add(
        "--memory",
        type=fraction,
        default=0.8,
        metavar="F",
        help="skip what needs more than this fraction of free GPU memory (default 0.8)",
    )
    add("--seed", type=integer(0), default=0, help="of trees and numbers (default 0)")
    add("--quick", action="store_true", help="batch 8, context 4096, 32 and 8x5, 20 repeats")
    add("--output", type=Path, help="write everything to this JSON file, after each case")
    return made


def _tree_shape(text: str) -> str:
    try:
        TreeShape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def main(argv: Sequence[str] | None = None) -> None:
    args = read_arguments(argv)
    passed = on_gpu(args) if torch.cuda.is_available() else without_gpu(args.output)
    if args.output is not None:
        print(f"Written to {args.output}")
    sys.exit(0 if passed else 1)


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Defaults filled in, and possible on this machine."""
    command = parser()
    args = command.parse_args(argv)
    for name, default in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.output is not None and (args.output.is_dir() or not args.output.parent.is_dir()):
        command.error(f"--output: {args.output} is a folder, or its folder does not exist")
    if find_spec("triton") is None:
        command.error("Triton is not installed, and the kernels are written in it")
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        command.error("TRITON_INTERPRET is set: this would time the interpreter; unset it")
    return args


def on_gpu(args: argparse.Namespace) -> bool:
    """Check and time; whether all kernels agreed and ran."""
    from shared_parts.gpu import Gpu
    from tree_attention_parts.measure import Settings
    from tree_attention_parts.run import Report, run

    gpu = Gpu(args.repeats)
    chosen = {name: value for name, value in vars(args).items() if name != "output"}
    surrounded = {**surroundings(gpu.name), **gpu.describe(), "options": chosen}
    settings = Settings(parts=args.parts, memory=args.memory)
    cases = [
        Case(
            HEADS[heads],
            batch,
            context,
            TreeShape.parse(nodes),
            block_size=args.block_size,
            seed=args.seed,
        )
        for heads, batch, context, nodes in product(
            args.shapes, args.batches, args.contexts, args.nodes
        )
    ]
    return run(gpu, cases, settings, Report(surrounded, args.output), wide_console())


def without_gpu(output: Path | None) -> bool:
    """Compare the kernels with their references, under the interpreter; whether all agreed."""
    with interpreter():
        from tree_attention_parts.run import Report, check_interpreted

        return check_interpreted(Report(surroundings(None), output), wide_console())


def surroundings(gpu: str | None) -> dict[str, Any]:
    found = machine.describe(gpu)
    found["versions"]["triton"] = metadata.version("triton")
    return found


@contextmanager
def interpreter() -> Iterator[None]:
    """Kernels first imported in here are run by Triton's interpreter, in here."""
    before = os.environ.get("TRITON_INTERPRET")
    if "triton" in sys.modules and before != "1":
        raise RuntimeError("Triton was imported before its interpreter was asked for")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


if __name__ == "__main__":
    main()
