# SPDX-License-Identifier: Apache-2.0
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

On a GPU, of the kernels that read the texts anew in each step: launches replayed from a CUDA graph,
with the L2 cache flushed before. The floor is 4 bytes of each token, once. Each text has a row with
room for the longest of --tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from shared_parts import launches, machine, results
from shared_parts.arguments import integer, positive, results_file, script_parser
from shared_parts.gpu import Gpu
from shared_parts.launches import Timed

from vllm_redrafter.config import LONGEST_PATH, MOST_MATCHES
from vllm_redrafter.drafting.context_index import ContextIndex

VOCAB_SIZE = 128_000
KINDS = {"random": None, "one token": 1, "periodic": 16}
"""Tokens until a text of the kind repeats."""

STEP_TOKENS = 3
"""What a step's verification yields."""
PROMPT_REPEATS = 3


def texts(kind: str, requests: int, tokens: int) -> npt.NDArray[Any]:
    """[requests, tokens] int32; each request has a text of its own."""
    distinct = KINDS[kind] or tokens
    drawn = np.random.default_rng(0).integers(VOCAB_SIZE, size=(requests, distinct), dtype=np.int32)
    return drawn[:, np.arange(tokens) % distinct]


def index_cost(
    kind: str, tokens: int, requests: int, options: argparse.Namespace
) -> dict[str, float]:
    """Time one size on a CPU: `step`, `prompt` for each request (both microseconds), `bytes`."""
    table = texts(kind, requests, tokens + STEP_TOKENS * (options.repeats + 1))
    names, rows = [str(row) for row in range(requests)], np.arange(requests)
    lengths = np.full(requests, tokens)
    index = ContextIndex(requests, options.context_matches, LONGEST_PATH, VOCAB_SIZE)

    def prompt() -> None:
        for name in names:
            index.forget(name)
        index.matches(names, table, rows, lengths)

    def step() -> None:
        nonlocal lengths
        lengths = lengths + STEP_TOKENS
        index.matches(names, table, rows, lengths)

    entered = microseconds(prompt, PROMPT_REPEATS) / requests
    num_bytes = index.num_bytes // requests
    return {
        "step": microseconds(step, options.repeats),
        "prompt": entered,
        "bytes": num_bytes,
    }


def microseconds(call: Callable[[], None], repeats: int) -> float:
    """The median; the first call is not timed, as it allocates."""
    call()
    times = []
    for _ in range(repeats):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return 1e6 * median(times)


def measured(gpu: Gpu, options: argparse.Namespace) -> Iterator[Timed]:
    """The search on a GPU."""
    from vllm_redrafter.triton_kernels.find_matches import MatchBuffers, find_matches

    room = max(options.tokens)
    for kind, tokens, requests in product(KINDS, options.tokens, options.requests):
        text = torch.zeros(requests, room, dtype=torch.int32, device=gpu.device)
        text[:, :tokens] = torch.from_numpy(texts(kind, requests, tokens))
        lengths = torch.full((requests,), tokens, dtype=torch.int32, device=gpu.device)
        entries = torch.arange(requests, device=gpu.device)
        found = MatchBuffers(requests, options.context_matches, LONGEST_PATH, room, gpu.device)
        given = text, lengths, entries, VOCAB_SIZE, found
        taken = gpu.in_graph(lambda given=given: find_matches(*given))
        yield Timed(kind, f"{requests} x {tokens}", 4 * requests * tokens, taken)


def of_index(options: argparse.Namespace) -> None:
    """Measure, print and write what the CPU engine's index costs."""
    made = Table("text", title="The CPU engine's index of texts")
    for column in ("tokens", "requests", "step, µs", "prompt, µs/request", "KB/request"):
        made.add_column(column, justify="right")
    costs = []
    for kind, tokens, requests in product(KINDS, options.tokens, options.requests):
        cost = index_cost(kind, tokens, requests, options)
        costs.append({"text": kind, "tokens": tokens, "requests": requests, **cost})
        times = f"{cost['step']:.0f}", f"{cost['prompt']:,.0f}"
        made.add_row(kind, f"{tokens:,}", str(requests), *times, f"{cost['bytes'] / 1000:,.0f}")
    results.wide_console().print(made)
    settings = {"context_matches": options.context_matches, "repeats": options.repeats}
    results.write(options.output, {**machine.describe(None), "index": costs, "settings": settings})


def main(argv: Sequence[str] | None = None) -> None:
    command = script_parser(__doc__)
    add = command.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(default cpu)")
    add("--tokens", type=positive, nargs="+", default=[100, 2000, 32000], help="of each text")
    add("--requests", type=positive, nargs="+", default=[1, 8, 64])
    add("--context-matches", type=integer(1, MOST_MATCHES), default=2, help="(default 2)")
    add("--repeats", type=positive, default=100, help="timed of each (default 100)")
    add("--output", type=results_file, help="write all figures to this JSON file")
    options = command.parse_args(argv)
    if options.device == "cpu":
        of_index(options)
    else:
        launches.run(command, options, measured)


if __name__ == "__main__":
    main()
