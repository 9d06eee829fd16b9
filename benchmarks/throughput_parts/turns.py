# SPDX-License-Identifier: Apache-2.0
"""Who measures when: engines that live side by side take turns, others come one after the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep
from typing import TypeVar

from throughput_parts.engine import Case, Job, Run
from throughput_parts.methods import Method
from throughput_parts.process import EngineProcess

T = TypeVar("T")

HEAD_START = 15.0
"""Seconds that engines which measure nothing while they start begin before one that does."""


@dataclass(frozen=True)
class Entry:
    """A method's part in the comparison; its engines' log is added to `log` if there is one."""

    method: Method
    cases: list[Case]
    job: Job
    log: Path | None

    @property
    def label(self) -> str:
        return self.method.label


def side_by_side(
    entries: Sequence[Entry],
    variables: dict[str, str],
    update: Callable[..., None],
    repeats: int,
    at_once: bool = False,
) -> Iterator[dict[str, list[Run]]]:
    """By label, each entry's runs in one repeat after the other; engines live at the same time."""
    with ExitStack() as stack:
        engines = start_all(entries, variables, stack, update, at_once)
        for repeat in range(repeats):
            yield in_turns(entries, engines, update, repeat)


def alone(
    entries: Sequence[Entry], variables: dict[str, str], update: Callable[..., None], repeats: int
) -> Iterator[dict[str, list[Run]]]:
    """As `side_by_side`, with engines that have the machine for themselves: in each repeat a fresh
    one after the other, each with all of its cases."""
    for repeat in range(repeats):
        runs: dict[str, list[Run]] = {entry.label: [] for entry in entries}
        for entry in rotated(entries, repeat):
            update(description=entry.label)
            job = replace(entry.job, seed=entry.job.seed + repeat)
            with EngineProcess(job, variables, entry.log) as engine:
                engine.wait_until_started()
                for case in entry.cases:
                    runs[entry.label].append(engine.measure(case))
                    update(advance=1)
        yield runs


def start_all(
    entries: Sequence[Entry],
    variables: dict[str, str],
    stack: ExitStack,
    update: Callable[..., None],
    at_once: bool = False,
) -> dict[str, EngineProcess]:
    """By label, each entry's engine, started and paused; they end with the stack.

    Args:
        entries: whose engines.
        variables: environment variables of the engines.
        stack: takes them.
        update: of the progress bar.
        at_once: start them together, which takes about as long as one of them where there are
            cores for all; on a CPU they would share caches and memory. An adaptive one measures
            what steps cost at the end of its start, which is the longest. So the first of them
            begins HEAD_START seconds after the others, for whom that is over by then, and any
            more have the machine to themselves.

    Raises:
        EngineError: one failed.
    """
    measuring = [entry for entry in entries if entry.method.is_adaptive]
    others = [entry for entry in entries if entry not in measuring]
    together, singly = ([*others, *measuring[:1]], measuring[1:]) if at_once else ([], entries)
    engines: dict[str, EngineProcess] = {}
    for group in filter(None, [together, *([entry] for entry in singly)]):
        update(description=f"start of {', '.join(entry.label for entry in group)}")
        started: dict[str, EngineProcess] = {}
        for entry in group:
            if entry in measuring and started:
                sleep(HEAD_START)
            engine = EngineProcess(entry.job, variables, entry.log)
            started[entry.label] = stack.enter_context(engine)
        for engine in started.values():
            engine.wait_until_started()
        for engine in started.values():
            engine.pause()
        engines |= started
    return engines


def in_turns(
    entries: Sequence[Entry],
    engines: Mapping[str, EngineProcess],
    update: Callable[..., None],
    repeat: int,
) -> dict[str, list[Run]]:
    """One repeat on paused engines: of each case, all methods' measurements in a row."""
    runs: dict[str, list[Run]] = {entry.label: [] for entry in entries}
    cases = dict.fromkeys(case for entry in entries for case in entry.cases)
    for number, case in enumerate(cases):
        present = [entry for entry in entries if case in entry.cases]
        for entry in rotated(present, repeat + number):
            update(description=entry.label)
            engine = engines[entry.label]
            engine.resume()
            runs[entry.label].append(engine.measure(case))
            # An idle engine polls for messages, for a second and more.
            engine.pause()
            update(advance=1)
    return runs


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Each turn starts with another item, so that none always meets the same conditions."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]
