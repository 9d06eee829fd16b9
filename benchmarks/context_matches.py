"""What it costs to find how a text went on before: on a CPU by an index, on a GPU by a search.

    python benchmarks/context_matches.py --output context-matches.json
    python benchmarks/context_matches.py --tokens 2000 --requests 1 8
    python benchmarks/context_matches.py --device cuda

Texts are of random tokens, of one token over and over, and with a period of 16 tokens: hardly a
token occurs twice in the first, and every place matches in the second. Times are medians.

On a CPU, of the index that the engine keeps:

- step: 3 tokens of each request are entered and its matches found, in a decoding step of all;
- prompt: a request's whole text is entered, in place of another one's;
- bytes: of the index, for each request, at that length.

On a GPU, of the kernels that read the texts anew in each step:

- time: replayed from a CUDA graph, with the L2 cache flushed before, after a comparison with the
  reference; each text has a row with room for the longest of --tokens;
- floor: 4 bytes of each token, once, over the bandwidth of a large copy in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from context_matches_parts import index
from context_matches_parts.texts import KINDS
from shared_parts import machine, results
from shared_parts.arguments import integer, positive, results_file, script_parser
from shared_parts.stopwatch import Stopwatch

from vllm_redrafter.config import LONGEST_PATH, MOST_MATCHES


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(default cpu)")
    add("--tokens", type=positive, nargs="+", default=[100, 2000, 32000], help="of each text")
    add("--requests", type=positive, nargs="+", default=[1, 8, 64])
    add("--context-matches", type=integer(1, MOST_MATCHES), default=2, help="(default 2)")
    add("--repeats", type=positive, default=100, help="timed of each (default 100)")
    add("--output", type=results_file, help="write all figures to this JSON file")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU: leave --device out for the CPU engine's index")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.device == "cpu":
        record = {**machine.describe(None), **of_index(args)}
    else:
        from shared_parts.gpu import Gpu

        gpu = Gpu(args.repeats)
        record = {**machine.describe(gpu.name), **gpu.describe(), **of_kernels(gpu, args)}
    record["settings"] = {"context_matches": args.context_matches, "repeats": args.repeats}
    results.write(args.output, record)


def of_index(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print what the CPU engine's index costs; the figures."""
    sizes = args.context_matches, LONGEST_PATH, args.repeats
    cases = product(KINDS, args.tokens, args.requests)
    costs = [index.measure(*case, *sizes) for case in cases]
    results.wide_console().print(index.table(costs))
    return {"index": [asdict(cost) for cost in costs]}


def of_kernels(stopwatch: Stopwatch, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print what the search on a GPU costs; the figures."""
    from context_matches_parts import kernel

    copy = stopwatch.copy_bandwidth()
    sizes = max(args.tokens), args.context_matches, LONGEST_PATH, copy
    cases = product(KINDS, args.tokens, args.requests)
    costs = [kernel.measure(stopwatch, case, *sizes) for case in cases]
    results.wide_console().print(kernel.table(costs, copy))
    return {"copy_gb_per_s": copy, "kernels": [asdict(cost) for cost in costs]}


if __name__ == "__main__":
    main()
