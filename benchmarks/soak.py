# SPDX-License-Identifier: Apache-2.0
r"""Does a server that drafts answer as plain vLLM does, under load, whatever it is asked?

    python benchmarks/soak.py --requests 2000 --output soak.json

`vllm serve` with a drafter, the batch's budget and a small KV cache gets requests of all kinds
(greedy and sampled, grammars, penalties, stop strings, n = 2, streamed or not), in an open loop at
a rate around its capacity with bursts of 64. The clients of a tenth go away midway. What was
answered is asked of plain vLLM again, with room for all, and compared: tokens, texts, and why they
ended; log-probabilities within 0.001. All in float32, where rounding does not change tokens.

The target is made up, and so is a drafter that guesses a good part of it.

The exit status is 1 if an answer differs or is missing, a block of the KV cache is not freed, or
memory grows in the second half by 50 MiB more than plain vLLM's does.
"""

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
from pathlib import Path
from time import perf_counter

import aiohttp
from shared_parts import machine, results
from shared_parts.arguments import positive, script_parser
from soak_parts.client import Client, Outcome, all_at_most
from soak_parts.comparison import difference
from soak_parts.load import apply, arrivals, capacity, later
from soak_parts.models import VOCABULARY, write_models
from soak_parts.report import PREEMPTIONS, USAGE, Report, counted
from soak_parts.requests import Request, requests
from soak_parts.server import Server, started

from vllm_redrafter import ConfigError

NAME = "target"
WARM_UP = 64
LOAD = 0.9
"""Of the server's capacity."""

IN_FLIGHT = 32
SPEC_TOKENS = 8
BLOCK, BLOCKS = 32, 64
"""Tokens of a block, and blocks of a KV cache that is too small."""


def main(given: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--requests", type=positive, default=2000, help="(default 2000)")
    add("--seed", type=int, default=0, help="of requests and arrivals (default 0)")
    add("--logs", type=Path, help="folder for the servers' logs (default: a temporary one)")
    args = parser.parse_args(given)
    begin = perf_counter()
    surroundings = machine.describe(gpu=None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = args.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        target, drafter = write_models(folder)
        servers = {"drafting": drafting(target, drafter), "plain": plain(target)}
        asked = requests(args.requests, VOCABULARY, args.seed)
        try:
            report = asyncio.run(soak(args, servers, asked, logs))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    seconds = perf_counter() - begin
    print("\n".join(report.lines()))
    print(f"in all         {seconds:.0f} s, with the servers' starts and plain vLLM's answers")
    record = {
        **surroundings,
        "settings": {name: vars(args)[name] for name in ("requests", "seed")},
        "kinds": Counter(request.kind for request in asked),
        "seconds_in_all": seconds,
        **report.as_json(),
    }
    results.write(args.output, record)
    for failure in report.failures():
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if report.failures() else 0


async def soak(
    args: argparse.Namespace, servers: dict[str, list[str]], asked: list[Request], logs: Path
) -> Report:
    """Both servers, one started after the other; one under load, and then the other."""
    with ExitStack() as until_the_end:
        drafting_server, plain_server = (
            until_the_end.enter_context(started(given, logs / f"{name}.log"))
            for name, given in servers.items()
        )
        # A connection for each request: the server closes those that idle, maybe just when they are
        # used again. And no limit on how many there are, or on their time.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as opened:
            report, answered = await under_load(args, drafting_server, opened, asked)
            await compare(args, plain_server, opened, answered, report)
    return report


async def under_load(
    args: argparse.Namespace, server: Server, opened: aiohttp.ClientSession, asked: list[Request]
) -> tuple[Report, list[tuple[Request, Outcome]]]:
    """All requests, at a rate around the server's capacity: what came of them, and answers."""
    client = Client(opened, server.address, NAME)
    # First what is made for first requests, grammars among it: it is no measure of capacity.
    for seed in (1, 2):
        rate = LOAD * await capacity(client, warm_up(args.seed + seed), IN_FLIGHT)
    before = await quiet_metrics(server, client)
    times = arrivals(len(asked), rate, args.seed)
    memory_midway = asyncio.create_task(later(times[len(times) // 2], server.resident_mib))
    outcomes, seconds = await apply(client, asked, times)
    after = await quiet_metrics(server, client)
    sent = [*zip(asked, outcomes, strict=True)]
    answered = [(request, outcome) for request, outcome in sent if outcome.answered]
    blocks = BLOCKS - 1  # vLLM keeps one to itself
    report = Report(
        sent=len(sent),
        answered=len(answered),
        aborted=sum(outcome.aborted for _, outcome in sent),
        errors=[f"{r}: {outcome.error}" for r, outcome in sent if outcome.error is not None],
        preemptions=int(after[PREEMPTIONS] - before[PREEMPTIONS]),
        offered_rate=rate,
        seconds=seconds,
        counters=counted(before, after),
        free_blocks=tuple(blocks - round(of[USAGE] * blocks) for of in (before, after)),
        memory=(await memory_midway, server.resident_mib()),
    )
    return report, answered


async def compare(
    args: argparse.Namespace,
    server: Server,
    opened: aiohttp.ClientSession,
    answered: Sequence[tuple[Request, Outcome]],
    report: Report,
) -> None:
    """Ask plain vLLM the same, and put down how it answers otherwise, and its memory."""
    client = Client(opened, server.address, NAME)
    await capacity(client, warm_up(args.seed + 1), IN_FLIGHT)
    bodies = [request.for_plain() for request, _ in answered]
    half = len(bodies) // 2
    expected = await all_at_most(client, bodies[:half], IN_FLIGHT)
    midway = server.resident_mib()
    expected += await all_at_most(client, bodies[half:], IN_FLIGHT)
    report.plain_memory = midway, server.resident_mib()
    for (request, ours), theirs in zip(answered, expected, strict=True):
        what = difference(request, ours, theirs)
        if what is not None:
            report.differences.append(f"{request}: {what}")


def warm_up(seed: int) -> list[dict[str, object]]:
    """Bodies of requests that both servers know."""
    return [request.for_plain() for request in requests(WARM_UP, VOCABULARY, seed)]


def drafting(target: Path, drafter: Path) -> list[str]:
    """The server that is tested: prompts are read in chunks, and the KV cache is too small."""
    speculative = {"model": str(drafter), "num_speculative_tokens": SPEC_TOKENS}
    return [
        *common(target),
        *("--speculative-config", json.dumps(speculative)),
        *("--num-gpu-blocks-override", str(BLOCKS)),
        *("--max-num-batched-tokens", str(IN_FLIGHT * (1 + SPEC_TOKENS) + 160)),
    ]


def plain(target: Path) -> list[str]:
    """vLLM alone, with room for all: it cannot read a seeded request's prompt in chunks."""
    return [*common(target), "--max-num-batched-tokens", "16384"]


def common(target: Path) -> list[str]:
    return [
        str(target),
        *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager"),
        *("--max-num-seqs", str(IN_FLIGHT), "--block-size", str(BLOCK)),
    ]


async def quiet_metrics(server: Server, client: Client) -> dict[str, float]:
    """The metrics with nothing in flight: a last request lets the server notice what has ended."""
    await client.ask({"prompt": [2], "max_tokens": 2, "temperature": 0, "stream": False})
    await asyncio.sleep(1)
    return server.metrics()


if __name__ == "__main__":
    # An exception, so that the servers are taken along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    sys.exit(main())
