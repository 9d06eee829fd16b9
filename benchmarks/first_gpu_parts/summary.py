"""OUT/summary.md: how every step ended, and the end of what it printed. The standard library alone.

cd benchmarks && python -m first_gpu_parts.summary OUT NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

LOG_LINES = 60
"""Of a step: its tables and figures come last."""

MOST_NAMED = 15
"""Of the tests that failed."""

NOT_RUN, INTERRUPTED = "not run", "interrupted"


@dataclass(frozen=True)
class Step:
    """What there is in OUT of one step.

    Attributes:
        name: of the step and of its files.
        status: how it ended. A log without NAME.state is one's that was interrupted.
        state: what NAME.state says, by key; empty where there is none.
    """

    name: str
    status: str
    state: dict[str, str]


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    text = summary(out, [read_step(out, name) for name in names])
    # In one go: a reader never finds half of it.
    unfinished = out / "summary.md.new"
    unfinished.write_text(text)
    unfinished.replace(out / "summary.md")


def read_step(out: Path, name: str) -> Step:
    file = out / f"{name}.state"
    lines = file.read_text().splitlines() if file.exists() else []
    state = {key: value for key, _, value in (line.partition(": ") for line in lines)}
    without = INTERRUPTED if (out / f"{name}.log").exists() else NOT_RUN
    return Step(name, state.get("status", without), state)


def summary(out: Path, steps: list[Step]) -> str:
    lines = ["# First run on a GPU", "", "| step | how it ended | seconds | limit | commit |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for step in steps:
        exit_status = f" (exit {step.state['exit']})" if step.status == "failed" else ""
        columns = (step.state.get(key, "") for key in ("seconds", "limit", "commit"))
        lines.append(f"| {step.name} | {step.status}{exit_status} | {' | '.join(columns)} |")
    for step in steps:
        if step.status != NOT_RUN:
            lines += ["", *section(out, step)]
    return "\n".join(lines) + "\n"


def section(out: Path, step: Step) -> Iterator[str]:
    yield f"## {step.name} ({step.status})"
    yield ""
    results, log = out / f"{step.name}.xml", out / f"{step.name}.log"
    if results.exists():
        yield from (f"- {figure}" for figure in of_tests(results))
    if log.exists():
        yield from (f"The end of `{log.name}`:", "", "````")
        yield from log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        yield "````"


def of_tests(results: Path) -> Iterator[str]:
    """pytest's JUnit file."""
    try:
        cases = list(ElementTree.parse(results).iter("testcase"))
    except ElementTree.ParseError as error:
        # Of a step that was ended while it wrote: the others' summaries must not be lost by it.
        yield f"its results cannot be read: {error!r}"
        return
    failed = [c for c in cases if any(c.find(tag) is not None for tag in ("failure", "error"))]
    skipped = [c for c in cases if c.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    yield f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped"
    for case in failed[:MOST_NAMED]:
        yield f"failed: `{case.get('classname')}::{case.get('name')}`"
    if len(failed) > MOST_NAMED:
        yield f"and {len(failed) - MOST_NAMED} more"


if __name__ == "__main__":
    main()
