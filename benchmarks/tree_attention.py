"""Tree attention's time against memory's: how near the kernel is to reading K and V once.

    python benchmarks/tree_attention.py --output results.json
    python benchmarks/tree_attention.py --batches 8 --contexts 4096 --nodes 32 8x5 --repeats 20

A case is R requests with a context of n keys and a token tree each, bf16, K and V in scattered
blocks of 16. Trees come from a beam search over random distributions (`32`: the 32 best nodes it
explored; `8x5`: all nodes on 8 finished beams of 5 tokens). It is timed beside

    (a) one node: the same kernel with the roots alone, which is plain decoding;
    (b) beams apart: no dedup. The same kernel; the path to every leaf is a request of its own with
        its own copy of the block table, so the context is read once per beam. (The context's blocks
        are shared, as with prefix caching: the L2 cache can serve some of these reads.)

How: CUDA events around single launches from a CUDA graph, after a warm-up, medians over --repeats.
The L2 cache is flushed before every launch, by reading a buffer of eight times its size, so that K
and V come from memory.

The floor is bytes / copy bandwidth. Bytes: K and V of context and tree once per KV head, queries
and output, block table, bit sets. (Not counted: the lengths, and the partial results of split keys,
which are the kernel's own affair.) The copy bandwidth is that of a large copy on the device in the
same run, bytes read and written; attention nearly only reads, so more than 100 % is possible.

Before anything is timed, kernels are compared with float64 references. Without a GPU this is all
that happens, on tiny cases in fp32, by Triton's interpreter (which gets products of bf16 wrong),
and nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from shared_parts import machine
from shared_parts.arguments import positive, results_file, script_parser
from shared_parts.results import wide_console
from tree_attention_parts.cases import HEADS, Case, TreeShape


def parser() -> argparse.ArgumentParser:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--batches", nargs="+", type=positive, default=[1, 8, 64], help="(default 1 8 64)")
    contexts = [512, 4096, 32768]
    add("--contexts", nargs="+", type=positive, default=contexts, help="(default 512 4096 32768)")
    add(
        "--nodes",
        nargs="+",
        type=_tree_shape,
        metavar="N|WxL",
        default=[*map(TreeShape.parse, ("4", "16", "32", "64", "8x5"))],
        help="nodes of a tree, root counted, or beams x tokens (default 4 16 32 64 8x5)",
    )
    add("--repeats", type=positive, default=50, help="launches timed (default 50)")
    add("--output", type=results_file, help="write everything to this JSON file, after each case")
    return made


def _tree_shape(text: str) -> TreeShape:
    try:
        return TreeShape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    command = parser()
    args = command.parse_args(argv)
    if not torch.cuda.is_available():
        return 0 if without_gpu(args.output) else 1
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        command.error("TRITON_INTERPRET is set: this would time the interpreter; unset it")
    return 0 if on_gpu(args) else 1


def on_gpu(args: argparse.Namespace) -> bool:
    """Check and time; whether all kernels agreed and ran."""
    from shared_parts.gpu import Gpu
    from tree_attention_parts.run import Report, run

    gpu = Gpu(args.repeats)
    surroundings = {**machine.describe(gpu.name), **gpu.describe(), "repeats": args.repeats}
    cases = [
        Case(heads, *sizes)
        for heads, *sizes in product(HEADS.values(), args.batches, args.contexts, args.nodes)
    ]
    return run(gpu, cases, Report(surroundings, args.output), wide_console())


def without_gpu(output: Path | None) -> bool:
    """Compare the kernels with their references, under the interpreter; whether all agreed."""
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    from tree_attention_parts.run import Report, check_interpreted

    return check_interpreted(Report(machine.describe(gpu=None), output), wide_console())


if __name__ == "__main__":
    sys.exit(main())
