"""What becomes of a server under load when something breaks, with plain vLLM beside it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from soak_parts.client import Client, Outcome
from soak_parts.server import Server

IN_FLIGHT = 32
LONG = 400
"""Tokens of an answer: it is still being written when the fault comes."""

SECONDS_TO_BEGIN = 60.0
SECONDS_TO_END = 40.0
"""A server that is still there after so long has not ended."""

SECONDS_TO_NOTICE = 10.0
ENGINE = "EngineCore"


@dataclass(frozen=True)
class Fault:
    """What was done to a server, and what became of it.

    Attributes:
        method: `ReDrafter` or `plain`.
        done: what was done.
        exit_code: of the server; None where it goes on.
        seconds: from the fault to the server's end; 0 where it goes on.
        requests: how many of those in flight ended in which way.
        processes: names of its processes that are left.
        shared_memory: files of it that are left.
        files: left in its temporary folder.
    """

    method: str
    done: str
    exit_code: int | None
    seconds: float
    requests: dict[str, int]
    processes: list[str]
    shared_memory: list[str]
    files: list[str]

    @property
    def leaves_something(self) -> bool:
        """Something of ours is still there though the server is not."""
        ours = [name for name in self.files if name.startswith("redrafter")]
        return bool(self.exit_code is not None and (self.processes or ours))


async def ends_by(
    server: Server,
    client: Client,
    method: str,
    done: str,
    fault: Callable[[Server], None],
    temporary: Path,
) -> Fault:
    """Put a load on a server, break something, and watch it end.

    Args:
        server: is running, and will not be.
        client: sends to it.
        method: for the record.
        done: likewise, what `fault` does.
        fault: breaks something.
        temporary: the server's folder for temporary files.
    """
    shared = _shared_memory(server)
    asked = await _under_load(client)
    begin = perf_counter()
    fault(server)
    while server.process.poll() is None and perf_counter() - begin < SECONDS_TO_END:
        await asyncio.sleep(0.05)
    seconds, exit_code = perf_counter() - begin, server.process.poll()
    outcomes = await asyncio.gather(*asked)
    await asyncio.sleep(2)  # what it told to end gets a moment
    return Fault(
        method,
        done,
        exit_code,
        seconds,
        ends(outcomes),
        sorted(server.processes().values()),
        sorted(name for name in shared if Path("/dev/shm", name).exists()),
        sorted(path.name for path in temporary.iterdir()),
    )


async def goes_on_without(
    server: Server, client: Client, method: str, drafter: Path, temporary: Path
) -> Fault:
    """Delete a drafter's folder under load; the server has read it."""
    asked = await _under_load(client)
    shutil.rmtree(drafter)
    outcomes = list(await asyncio.gather(*asked))
    outcomes += await asyncio.gather(*(client.ask(_body(i, 16)) for i in range(IN_FLIGHT)))
    left = sorted(path.name for path in temporary.iterdir())
    code = server.process.poll()
    done = "the drafter's folder is deleted"
    return Fault(method, done, code, 0.0, ends(outcomes), [], [], left)


def ends_well(fault: Fault, others: Sequence[Fault]) -> bool:
    """Does a server go on as if nothing was, or end soon and in the way of plain vLLM's?

    Args:
        fault: what became of it.
        others: of plain vLLM's as well.
    """
    alike = [other for other in others if other.done == fault.done]
    codes = {other.exit_code for other in alike if other.method != fault.method}
    if not codes:  # nothing that plain vLLM's has
        return fault.exit_code is None and set(fault.requests) == {"answered whole"}
    if fault.exit_code is None:
        return codes == {None}
    return fault.seconds < SECONDS_TO_NOTICE and codes == {fault.exit_code}


def kill_engine(server: Server) -> None:
    """kill -9 of the engine core."""
    found = [process for process, name in server.processes().items() if ENGINE in name]
    if len(found) != 1:
        raise RuntimeError(f"one process of {server.processes()} should be the engine core")
    os.kill(found[0], signal.SIGKILL)


def ask_to_end(server: Server) -> None:
    """SIGTERM to the server, as whoever supervises it would."""
    server.process.send_signal(signal.SIGTERM)


def ends(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many requests ended in which way."""
    kinds = Counter(
        "answered whole"
        if o.answered and all(c.finish == "length" for c in o.choices)
        else f"ended by the server ({o.choices[0].finish or 'no reason'})"
        if o.answered
        else "connection lost"
        if "Client" in (o.error or "") or "Connect" in (o.error or "")
        else "an error from the server"
        for o in outcomes
    )
    return dict(sorted(kinds.items()))


def rows(faults: Sequence[Fault]) -> list[str]:
    """For a reader."""
    lines = []
    for fault in faults:
        ended = "goes on" if fault.exit_code is None else f"ends with {fault.exit_code}"
        after = "" if fault.exit_code is None else f" after {fault.seconds:.1f} s"
        requests = ", ".join(f"{count} {how}" for how, count in fault.requests.items())
        left = fault.processes + fault.shared_memory + fault.files
        lines.append(
            f"{fault.method}, {fault.done}: {ended}{after}; {requests}; left: "
            f"{', '.join(left) or 'nothing'}"
        )
    return lines


async def _under_load(client: Client) -> list[asyncio.Task[Outcome]]:
    """Requests that are being answered, and more that wait."""
    outcomes = [asyncio.create_task(client.ask(_body(i, LONG))) for i in range(IN_FLIGHT)]
    deadline = perf_counter() + SECONDS_TO_BEGIN
    first = client.ask(_body(IN_FLIGHT, 1))
    # When a later one has been answered, those before it are being answered.
    outcome = await asyncio.wait_for(first, deadline - perf_counter())
    if outcome.error is not None:
        raise RuntimeError(f"the server does not answer: {outcome.error}")
    return outcomes


def _body(number: int, tokens: int) -> dict[str, object]:
    return {
        "prompt": [2 + number, 3, 4],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
        "return_token_ids": True,
    }


def _shared_memory(server: Server) -> set[str]:
    """Files of shared memory that its processes have mapped."""
    found = set()
    for process in server.processes():
        try:
            maps = Path(f"/proc/{process}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split("/dev/shm/")[1].split(" ")[0] for line in maps if "/dev/shm/" in line}
    return found
