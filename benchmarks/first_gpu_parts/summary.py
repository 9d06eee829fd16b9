"""OUT/summary.md: how every step ended, and its key figures. The standard library alone.

cd benchmarks && python -m first_gpu_parts.summary OUT NAME...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

LOG_LINES = 15
"""Of a step that did not end well."""
DONE, NOT_RUN, INTERRUPTED = "done", "not run", "interrupted"


@dataclass(frozen=True)
class Step:
    """What there is in OUT of one step.

    Attributes:
        name: of the step and of its files.
        status: how it ended. A log without NAME.state is one's that was interrupted.
        state: what NAME.state says, by key; empty where there is none.
        figures: lines of text.
    """

    name: str
    status: str
    state: dict[str, str]
    figures: list[str]


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
    return Step(name, state.get("status", without), state, read_figures(out, name))


def read_figures(out: Path, name: str) -> list[str]:
    """The step's figures, as far as it has written any."""
    figures, results = out / f"{name}.json", out / f"{name}.xml"
    try:
        if results.exists():
            return list(of_tests(ElementTree.parse(results).getroot()))
        if figures.exists():
            return list(FIGURES[name](json.loads(figures.read_text())))
    # Whatever a step that was ended has left behind: it must not take the others' figures along.
    except Exception as error:
        return [f"its figures cannot be read: {error!r}"]
    return []


# What is said of each step's figures


def of_environment(found: dict[str, Any]) -> Iterator[str]:
    device = found["device"]
    yield (
        f"{device['name']}, compute capability {device['capability']}, {device['memory_gib']} GiB, "
        f"{device['multiprocessors']} multiprocessors, driver {device['driver']}, "
        f"CUDA {device['cuda']}"
    )
    yield ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield from found["missing"]


def of_tests(root: ElementTree.Element) -> Iterator[str]:
    """pytest's JUnit file."""
    cases = list(root.iter("testcase"))
    failed = [case for case in cases if any(case.find(tag) is not None for tag in FAILURES)]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    yield f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped"
    for case in failed[:LOG_LINES]:
        yield f"failed: `{case.get('classname')}::{case.get('name')}`"
    if len(failed) > LOG_LINES:
        yield f"and {len(failed) - LOG_LINES} more"


FAILURES = ("failure", "error")


def of_parity(found: dict[str, Any]) -> Iterator[str]:
    for name, engine in found["engines"].items():
        yield f"{name}: {PASSED[engine['checks']]}"
        if name == "plain" or engine["checks"] is None:
            continue
        for sampling, compared in engine["agreement"].items():
            yield f"{name}, {sampling}: {compared['equal']} of {compared['of']} answers are equal"
            for apart in compared["differences"]:
                gap = "unknown" if apart["gap"] is None else f"{apart['gap']:.1e} nats"
                yield f"request {apart['request']} from token {apart['position']} on; gap {gap}"
        yield f"{name}: {engine['accepted']} drafted tokens accepted"


PASSED = {
    "error": "nothing compiled or waited while it answered",
    "warn": "compiled or waited while it answered, or died otherwise at first (see its log)",
    None: "failed (see its log)",
}


def of_tree_attention(found: dict[str, Any]) -> Iterator[str]:
    yield from disagreements(found["checks"])
    if found["timings"] is None:
        return
    yield f"copy bandwidth {found['copy_gbps']:.0f} GB/s"
    for goal in found["goals"]:
        yield f"{goal['goal']}: {goal['status']}, worst {goal['worst'] or 'unknown'}"
    for case in found["timings"]["attention"]:
        tree = microseconds(case["tree"])
        bandwidth = None if tree is None else case["floor_bytes"] / tree / 1000
        shares = {
            "of copy": ratio(bandwidth, found["copy_gbps"]),
            "× one node": ratio(tree, microseconds(case["one_node"])),
            "flex ÷ tree": ratio(microseconds(case["flex"]), tree),
            "beams apart ÷ tree": ratio(microseconds(case["beams"]), tree),
        }
        said = ", ".join(f"{share} {shown(value)}" for share, value in shares.items())
        yield f"{case['heads']}, {case['batch']} × {case['context']}, nodes {case['nodes']}: {said}"


def disagreements(checks: list[dict[str, Any]]) -> Iterator[str]:
    for check in checks:
        if check["error"] is None or check["error"] > check["tolerance"]:
            yield f"WRONG: {check['kernel']}, {check['case']}: error {check['error']}"


def of_kernel_resources(found: dict[str, Any]) -> Iterator[str]:
    kernels = found["kernels"]
    yield f"{len(kernels)} kernels compiled"
    for kernel in kernels:
        if kernel["stack"]:
            yield f"{kernel['name']}, {kernel['case']}: spills {kernel['stack']} bytes per thread"
        if not kernel["blocks"]:
            yield f"{kernel['name']}, {kernel['case']}: does not fit on a multiprocessor"


def of_draft_layers(found: dict[str, Any]) -> Iterator[str]:
    """Ours beside products of as many bytes; and the fastest tile of the cell, if it is another."""
    yield f"copy bandwidth {found['copy_tb_per_s']:.2f} TB/s"
    for (hidden, rows), group in groupby(
        found["layers"], lambda each: (each["hidden"], each["rows"])
    ):
        measured = list(group)
        shown_first = ", ".join(
            f"{each['name']} {each['microseconds']:.1f} µs" for each in measured[:4]
        )
        yield f"H {hidden}, {rows} rows: {shown_first}"
        if tried := measured[4:]:
            best = min(tried, key=lambda each: float(each["microseconds"]))
            numbers = ", ".join(f"{name} {number}" for name, number in best["tile"].items())
            mark = " (usual)" if best["usual"] else ""
            yield f"fastest of {len(tried)} tiles: {best['microseconds']:.1f} µs, {numbers}{mark}"


def of_step_cost(found: dict[str, Any]) -> Iterator[str]:
    for cost in found["steps"]:
        of = f"{cost['target']}, {cost['requests']} × {cost['context']}"
        if not cost["nodes"]:
            yield f"{of}: a plain step {cost['step']:.2f} ms, gap {cost['parts']['gap']:.2f}"
            continue
        parts = ", ".join(f"{part} {time:.2f}" for part, time in cost["parts"].items())
        yield (
            f"{of}, K {cost['nodes']}: {cost['step']:.2f} ms, {shown(cost['ratio'])} × plain "
            f"({parts})"
        )


def of_throughput(found: dict[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        if row["task"] is not None:
            continue
        # Spreads: median, low, high.
        speed, times_plain = row["tokens_per_second"][0], row["ratio"][0]
        equal = (
            "" if row["identical"] is None else f", {row['identical']} of {row['requests']} equal"
        )
        yield (
            f"temperature {row['temperature']:g}, {row['concurrency']} in flight, {row['method']} "
            f"{row['shape']}".rstrip()
            + f": {speed:.0f} tokens/s, {times_plain:.2f} × plain, "
            f"{shown(row['tokens_per_step'])} tokens/step{equal}"
        )


def of_profiler_trace(found: dict[str, Any]) -> Iterator[str]:
    yield f"in `profiler_trace/`: {', '.join(found['traces']) or 'nothing'}"
    total = found["total_ms"]
    for kernel in found["kernels"]:
        share = f"{kernel['ms'] / total:.0%}"
        yield f"{share} {kernel['ms']:.2f} ms, {kernel['calls']} calls: `{kernel['name'][:100]}`"


FIGURES: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "environment": of_environment,
    "parity": of_parity,
    "prefill_parity": of_parity,
    "tree_attention": of_tree_attention,
    "draft_layers": of_draft_layers,
    "kernel_resources": of_kernel_resources,
    "step_cost_llama_3_8b": of_step_cost,
    "step_cost_llama_7b": of_step_cost,
    "throughput": of_throughput,
    "profiler_trace": of_profiler_trace,
}


def microseconds(cell: dict[str, Any]) -> float | None:
    """The median of a timing; None of one that is missing, which has a reason instead."""
    return median(cell["microseconds"]) if "microseconds" in cell else None


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


# The document


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
    unfinished = "" if step.status == DONE else f" ({step.status})"
    yield f"## {step.name}{unfinished}"
    yield ""
    yield from (f"- {figure}" for figure in step.figures or ["no figures"])
    log = out / f"{step.name}.log"
    if step.status != DONE and log.exists():
        yield from ("", f"The end of `{log.name}`:", "", "````")
        yield from log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        yield "````"


if __name__ == "__main__":
    main()
