"""What it costs to find how a text went on before: the index of the CPU engine.

    python benchmarks/context_matches.py --output context-matches.json
    python benchmarks/context_matches.py --tokens 2000 --requests 1 8

Texts are of random tokens, of one token over and over, and with a period of 16 tokens: hardly a
token occurs twice in the first, and every place matches in the second. Times are medians.

- step: 3 tokens of each request are entered and its matches found, in a decoding step of all;
- prompt: a request's whole text is entered, in place of another one's;
- bytes: of the index, for each request, at that length.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

from context_matches_parts import index
from context_matches_parts.texts import KINDS
from shared_parts import machine, results
from shared_parts.arguments import integer, positive, results_file, script_parser

from vllm_redrafter.config import LONGEST_PATH, MOST_MATCHES


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=positive, nargs="+", default=[100, 2000, 32000], help="of each text")
    add("--requests", type=positive, nargs="+", default=[1, 8, 64])
    add("--context-matches", type=integer(1, MOST_MATCHES), default=2, help="(default 2)")
    add("--repeats", type=positive, default=100, help="steps that are timed (default 100)")
    add("--output", type=results_file, help="write all figures to this JSON file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    record = machine.describe(None)
    record["settings"] = {"context_matches": args.context_matches, "repeats": args.repeats}
    sizes = args.context_matches, LONGEST_PATH, args.repeats
    costs = [index.measure(*case, *sizes) for case in product(KINDS, args.tokens, args.requests)]
    results.wide_console().print(index.table(costs))
    record["index"] = [asdict(cost) for cost in costs]
    results.write(args.output, record)


if __name__ == "__main__":
    main()
