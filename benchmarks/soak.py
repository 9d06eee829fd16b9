r"""Does a server that drafts answer as plain vLLM does, for hours, whatever it is asked?

    python benchmarks/soak.py --requests 2000 --output soak.json
    python benchmarks/soak.py --model TARGET --drafter DRAFTER --seconds 3600

`vllm serve` with a drafter, the batch's budget and a small KV cache gets requests of all kinds
(greedy and sampled, grammars, penalties, stop strings, n = 2, streamed or not), in an open loop at
a rate around its capacity with bursts of 64. The clients of a tenth go away midway. What was
answered is asked of plain vLLM again, with room for all, and compared: tokens, texts, and why they
ended; log-probabilities within 0.001. All in float32, where rounding does not change tokens.

Without --model a target is made up, and a drafter that guesses a good part of it.

The exit status is 1 if an answer differs or is missing, a block of the KV cache is not freed, or
memory grows by --most-growth more than plain vLLM's does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
from shared_parts import machine, results
from shared_parts.arguments import not_negative, positive, results_file, script_parser
from soak_parts.arrivals import arrivals
from soak_parts.client import Client, Outcome
from soak_parts.comparison import difference
from soak_parts.load import Look, Run, all_again, apply, capacity
from soak_parts.models import write_models
from soak_parts.report import (
    PREEMPTIONS,
    USAGE,
    Report,
    counted,
    first_tokens,
    gaps,
    percentiles,
)
from soak_parts.requests import Request, requests
from soak_parts.server import Server, ServerError

from vllm_redrafter.engine.cpu.environment import cpu_variables

NAME = "target"
BLOCK = 32
WARM_UP = 64


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--model", help="the target: folder or hub id (default: one that is made up)")
    add("--drafter", help="the ReDrafter checkpoint for it")
    add("--requests", type=positive, default=2000, help="(default 2000)")
    add("--seconds", type=not_negative, default=3600.0, help="send no longer (default 3600)")
    add("--load", type=not_negative, default=0.9, help="of the server's capacity (default 0.9)")
    add("--in-flight", type=positive, default=32, help="vLLM's max_num_seqs (default 32)")
    add("--blocks", type=positive, default=64, help=f"of {BLOCK} tokens: the KV cache (default 64)")
    add("--spec-tokens", type=positive, default=8, help="K (default 8)")
    add("--vocabulary", type=positive, default=512, help="ids of prompts are below it")
    add("--seed", type=int, default=0, help="of requests and arrivals (default 0)")
    add(
        "--most-growth",
        type=not_negative,
        default=100.0,
        help="of memory, MiB beyond plain vLLM's (default 100)",
    )
    add("--logs", type=Path, help="folder for the servers' logs (default: a temporary one)")
    add("--at-once", action="store_true", help="start both servers at once: quicker, more memory")
    add("--output", type=results_file, help="write all figures to this JSON file")
    args = parser.parse_args(given)
    if (args.model is None) != (args.drafter is None):
        parser.error("--model and --drafter: give both or neither")
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    begin = perf_counter()
    surroundings = machine.describe(gpu=None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = args.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        if args.model is None:
            args.model, args.drafter = map(str, write_models(folder))
        asked = requests(args.requests, args.vocabulary, args.seed)
        try:
            report = asyncio.run(soak(args, asked, logs))
        except ServerError as error:
            print(error, file=sys.stderr)
            return 2
    seconds = perf_counter() - begin
    print("\n".join(report.lines()))
    print(f"in all         {seconds:.0f} s, with the servers' starts and plain vLLM's answers")
    settings = {**vars(args), "output": None, "logs": None}
    settings |= {"model": Path(args.model).name, "drafter": Path(args.drafter).name}
    kinds = Counter(request.kind for request in asked)
    record = {
        **surroundings,
        "settings": settings,
        "kinds": kinds,
        "seconds_in_all": seconds,
        **report.as_json(),
    }
    results.write(args.output, record)
    for failure in report.failures():
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if report.failures() else 0


async def soak(args: argparse.Namespace, asked: list[Request], logs: Path) -> Report:
    """Both servers, one under load after the other."""
    with ExitStack() as until_the_end:

        def start_plain() -> Server:
            return until_the_end.push(Server(plain(args), logs / "plain.log", environment()))

        early = start_plain() if args.at_once else None
        with Server(drafting(args, args.drafter), logs / "drafting.log", environment()) as server:
            if early is not None:
                early.wait_until_ready()
            loaded = await under_load(args, server, asked)
        server = start_plain() if early is None else early
        server.wait_until_ready()
        run, before, after = loaded.run, loaded.before, loaded.after
        answered = [
            (request, outcome)
            for request, outcome in zip(asked, run.outcomes, strict=True)
            if outcome is not None and outcome.answered
        ]
        bodies = [request.for_plain() for request, _ in answered]
        expected, plain_looks = await asked_again(args, server, bodies)
    blocks = args.blocks - 1  # vLLM keeps one to itself
    return Report(
        sent=sum(outcome is not None for outcome in run.outcomes),
        answered=len(answered),
        aborted=sum(outcome is not None and outcome.aborted for outcome in run.outcomes),
        errors=errors(asked, run),
        differences=differences(answered, expected),
        preemptions=int(after[PREEMPTIONS] - before[PREEMPTIONS]),
        offered_rate=loaded.rate,
        seconds=run.seconds,
        first_token=percentiles(first_tokens(run.outcomes)),
        between_tokens=percentiles(gaps(run.outcomes)),
        counters=counted(before, after),
        free_blocks=(
            blocks - round(before[USAGE] * blocks),
            blocks - round(after[USAGE] * blocks),
        ),
        looks=run.looks,
        plain_looks=plain_looks,
        most_growth=args.most_growth,
    )


@dataclass(frozen=True)
class Loaded:
    """A server under load: requests per second, what came of them, metrics before and after."""

    rate: float
    run: Run
    before: dict[str, float]
    after: dict[str, float]


async def under_load(args: argparse.Namespace, server: Server, asked: list[Request]) -> Loaded:
    """All requests, at a rate around the server's capacity."""
    async with session() as opened:
        client = Client(opened, server.address, NAME)
        # First what is made for first requests, grammars among it: it is no measure of capacity.
        for seed in (1, 2):
            warm_up = requests(WARM_UP, args.vocabulary, args.seed + seed)
            bodies = [request.body for request in warm_up]
            rate = args.load * await capacity(client, bodies, args.in_flight)
        before = await quiet_metrics(server, client)
        times = arrivals(len(asked), rate, args.seed)
        run = await apply(server, client, asked, times, args.seconds)
        return Loaded(rate, run, before, await quiet_metrics(server, client))


async def asked_again(
    args: argparse.Namespace, server: Server, bodies: Sequence[dict[str, Any]]
) -> tuple[list[Outcome], list[Look]]:
    """Plain vLLM's answers, and looks at its memory."""
    warm_up = requests(WARM_UP, args.vocabulary, args.seed + 1)
    async with session() as opened:
        client = Client(opened, server.address, NAME)
        await capacity(client, [request.for_plain() for request in warm_up], args.in_flight)
        return await all_again(server, client, bodies, args.in_flight)


def errors(asked: Sequence[Request], run: Run) -> list[str]:
    return [
        f"request {request.number} ({request.kind}): {outcome.error}"
        for request, outcome in zip(asked, run.outcomes, strict=True)
        if outcome is not None and outcome.error is not None
    ]


def differences(
    answered: Sequence[tuple[Request, Outcome]], expected: Sequence[Outcome]
) -> list[str]:
    found = []
    for (request, ours), theirs in zip(answered, expected, strict=True):
        what = difference(request, ours, theirs)
        if what is not None:
            found.append(f"request {request.number} ({request.kind}): {what}")
    return found


def drafting(args: argparse.Namespace, drafter: str | Path) -> list[str]:
    """The server that is tested: prompts are read in chunks, and the KV cache is too small."""
    speculative = {"model": str(drafter), "num_speculative_tokens": args.spec_tokens}
    return [
        *common(args),
        *("--speculative-config", json.dumps(speculative)),
        *("--num-gpu-blocks-override", str(args.blocks)),
        *("--max-num-batched-tokens", str(args.in_flight * (1 + args.spec_tokens) + 160)),
    ]


def plain(args: argparse.Namespace) -> list[str]:
    """vLLM alone, with room for all: it cannot read a seeded request's prompt in chunks."""
    return [*common(args), "--max-num-batched-tokens", "16384"]


def common(args: argparse.Namespace) -> list[str]:
    return [
        args.model,
        *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager"),
        *("--max-num-seqs", str(args.in_flight), "--block-size", str(BLOCK)),
    ]


def environment() -> dict[str, str]:
    level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    return {**os.environ, **cpu_variables(os.environ), "VLLM_LOGGING_LEVEL": level}


def session() -> aiohttp.ClientSession:
    """As many connections as there are requests, and no limit of its own on their time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def quiet_metrics(server: Server, client: Client) -> dict[str, float]:
    """The metrics with nothing in flight: a last request lets the server notice what has ended."""
    await client.ask({"prompt": [2], "max_tokens": 2, "temperature": 0, "stream": False})
    await asyncio.sleep(1)
    return server.metrics()


if __name__ == "__main__":
    # An exception, so that the servers are taken along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    sys.exit(main())
