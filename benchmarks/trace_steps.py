r"""How long a GPU computes in each kind of step, by traces of vLLM's torch profiler.

    python benchmarks/trace_steps.py TRACE.pt.trace.json.gz ... --output steps.json

vLLM writes a trace between `LLM.start_profile()` and `LLM.stop_profile()` (in a server, between
requests to /start_profile and /stop_profile), given a `profiler_config` of {"profiler": "torch",
"torch_profiler_dir": FOLDER, "torch_profiler_with_stack": false}.

Steps of as many requests and rows are one line; times are medians. `busy` is how long kernels and
copies ran, `forward` what of it was the target's pass: draft, sampling and the rest are the
difference. `period` is how long a step took, and most of what the GPU waits in it, it waits for the
host, which the profiler makes slower: without it, steps are between `busy` and `period`. `host` is
what a call of vLLM's own operations takes it, where layers are called from Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from shared_parts import results
from shared_parts.arguments import positive, results_file, script_parser
from shared_parts.traces import Step, busiest, host_calls, read_events, steps


def main(argv: Sequence[str] | None = None) -> None:
    command = script_parser(__doc__)
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    command.add_argument(
        "--kernels", type=positive, default=12, help="the busiest to name (default 12)"
    )
    command.add_argument("--output", type=results_file, help="write all figures to this JSON file")
    options = command.parse_args(argv)
    console, found = results.wide_console(), []
    for path in options.traces:
        try:
            events = read_events(path)
        except (OSError, ValueError) as error:
            command.error(f"{path}: {error}; give traces of the torch profiler, as it writes them")
        lines, kernels = by_kind(steps(events)), busiest(events)[: options.kernels]
        if not lines:
            command.error(f"{path}: no step of a target on a GPU is in it")
        calls = host_calls(events)
        found.append({"trace": path.name, "steps": lines, "kernels": kernels, "host": calls})
        print_trace(path.name, lines, kernels, calls, console)
    results.write(options.output, {"traces": found})


def by_kind(made: Sequence[Step]) -> list[dict[str, Any]]:
    """Medians over steps of as many requests and rows, in the order of the first of them."""
    kinds: defaultdict[tuple[int, ...], list[Step]] = defaultdict(list)
    for step in made:
        kinds[step.prompts, step.prompt_rows, step.decoding, step.decoding_rows].append(step)
    lines = []
    for (prompts, prompt_rows, decoding, decoding_rows), alike in kinds.items():
        periods = [step.period for step in alike if step.period is not None]
        lines.append(
            {
                "steps": len(alike),
                "prompts": prompts,
                "prompt_rows": prompt_rows,
                "decoding": decoding,
                "decoding_rows": decoding_rows,
                "period_ms": round(median(periods), 3) if periods else None,
                "busy_ms": round(median(step.busy for step in alike), 3),
                "forward_ms": round(median(step.forward for step in alike), 3),
            }
        )
    return lines


def print_trace(
    name: str,
    lines: list[dict[str, Any]],
    kernels: list[dict[str, Any]],
    calls: list[dict[str, Any]],
    console: Console,
) -> None:
    """A table of steps; then what took the GPU longest, and what vLLM's layers took the host."""
    table = Table("steps", "prompts (rows)", "decoding (rows)", "period", "busy", "forward")
    table.title = f"{name}: milliseconds"
    for line in lines:
        period = "–" if line["period_ms"] is None else f"{line['period_ms']:.2f}"
        table.add_row(
            str(line["steps"]),
            f"{line['prompts']} ({line['prompt_rows']})",
            f"{line['decoding']} ({line['decoding_rows']})",
            period,
            f"{line['busy_ms']:.2f}",
            f"{line['forward_ms']:.2f}",
        )
    console.print(table)
    for kernel in kernels:
        each = 1000 * kernel["ms"] / kernel["calls"]
        console.print(
            f"{kernel['ms']:9.2f} ms {kernel['calls']:6d} × {each:7.1f} µs  {kernel['name'][:90]}",
            markup=False,
            highlight=False,
        )
    for call in calls:
        console.print(
            f"host: {call['calls']:6d} × {call['median_us']:7.1f} µs  {call['name']}",
            markup=False,
            highlight=False,
        )


if __name__ == "__main__":
    main()
