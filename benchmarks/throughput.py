r"""Plain decoding, ReDrafter and vLLM's n-gram speculation side by side.

    python benchmarks/throughput.py --model TARGET --drafter DRAFTER --dataset prompts.jsonl \
        --concurrency 1 4 8 --shape 1=2x4:8 4=2x3:4 8=1x3:3 --adaptive 4x5:12 \
        --output results.json --plot out.png

ReDrafter comes in fixed shapes, whose K nodes are verified in every step, and adaptive: a step
verifies as many nodes as pay, or none. With --random-drafter it is measured with a drafter of
random weights as well, for what a useless one costs.

Every method and shape gets an engine of its own. At a concurrency (that many requests in flight)
and temperature all engines answer the same prompts, after a warm-up of one answer per request in
flight, without prefix caching; `--repeats` does all of it again, in another order.

On a CPU all engines are started once, have memory at the same time, and take turns: at each
concurrency and temperature one measurement follows the other within seconds, with the other
engines paused, so that whatever slows the machine down meets all methods alike. A GPU has no
memory for two: there each engine does all of a repeat alone, in a fresh process.

The adaptive method keeps what it has learned for as long as its engine lives, as in a server: from
level to level, and on a CPU from repeat to repeat.

Targets loop under greedy decoding, small ones above all, and repeated text is easy to draft, for
n-grams most of all. So the table has the share of repeated 8-grams beside the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from shared_parts import machine, results
from shared_parts.arguments import json_object, not_negative, positive, script_parser
from throughput_parts.engine import Case, Job, Run
from throughput_parts.methods import NGRAM_NOTE, InputError, Method, plan, with_random_drafter
from throughput_parts.process import EngineError, EngineProcess, environment
from throughput_parts.prompts import choose, read_dataset, tokenize
from throughput_parts.random_drafter import write_random_drafter
from throughput_parts.report import Measurement, measurements, print_table, summarise

from vllm_redrafter import ConfigError
from vllm_redrafter.checkpoints.reading import check_checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A method's part in the comparison.

    Attributes:
        method: how it decodes.
        cases: what it is measured at.
        job: what its engine is started with.
    """

    method: Method
    cases: list[Case]
    job: Job

    @property
    def label(self) -> str:
        return self.method.label


def parser() -> argparse.ArgumentParser:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--model", required=True, help="the target: folder or hub id")
    add("--drafter", required=True, help="the ReDrafter checkpoint: folder or hub id")
    add("--prompt", action="append", default=[], help="a prompt; may be repeated")
    add("--dataset", type=Path, help="prompts: .txt (one per line), .jsonl, .json, .parquet")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put prompts through the target's chat template (default: only conversations)",
    )
    add("--num-prompts", type=positive, default=32, help="at most, drawn at random (default 32)")
    add(
        "--prompts-per-request",
        type=positive,
        metavar="N",
        help="answer only N prompts per request in flight, so that low concurrency does not take "
        "longest (default: all prompts at every concurrency)",
    )
    add("--max-tokens", type=positive, default=128, help="per request (default 128)")
    add("--ignore-eos", action="store_true", help="output --max-tokens in any case")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add("--concurrency", **several, type=positive, help="requests in flight (default 1 4 8)")
    add(
        "--shape",
        **several,
        metavar="[C=]WxL:K",
        help="fixed beam width, beam length, tree nodes; C= for concurrency C only (default 2x4:6)",
    )
    add(
        "--adaptive",
        **several,
        metavar="WxL:K",
        help="the adaptive method's maxima of the same (default 4x5:12)",
    )
    add("--no-adaptive", action="store_true", help="leave the adaptive method out")
    add(
        "--random-drafter",
        action="store_true",
        help="the adaptive method with a drafter of random weights as well",
    )
    add(
        "--ngram-tokens",
        **several,
        metavar="[C=]K",
        help="tokens that n-gram speculation proposes; C= for concurrency C only (default 5)",
    )
    add("--temperature", **several, type=not_negative, help="(default 0 0.7)")
    add("--repeats", type=positive, default=3, help="of everything (default 3)")
    add("--seed", type=int, default=0, help="of the choice of prompts and of sampling (default 0)")
    add("--dtype", default="auto", help="vLLM's (default auto)")
    add("--max-model-len", type=positive, help="vLLM's")
    add("--enforce-eager", action=argparse.BooleanOptionalAction, default=False, help="vLLM's")
    add(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help="more arguments of vllm.LLM",
    )
    add("--output", type=Path, help="write all measurements to this JSON file")
    add("--plot", type=Path, help="draw the ratios to this PNG file")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    command = parser()
    args = command.parse_args(argv)
    # Not argparse defaults: `extend` would add to them.
    args.concurrency = args.concurrency or [1, 4, 8]
    args.shape = args.shape or ["2x4:6"]
    args.ngram_tokens = args.ngram_tokens or ["5"]
    if args.adaptive and args.no_adaptive:
        command.error("--adaptive and --no-adaptive exclude each other: give one of them")
    args.adaptive = [] if args.no_adaptive else args.adaptive or ["4x5:12"]
    args.temperature = sorted(set(args.temperature or [0.0, 0.7]))
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            methods = _methods(args, Path(folder) / "random-drafter")
            _check_outputs(args)
            prompts = _prompts(args, console)
        except (InputError, ConfigError) as error:
            command.error(str(error))
        try:
            _compare(args, methods, prompts, console)
        except EngineError as error:
            sys.exit(str(error))


def _methods(args: argparse.Namespace, random_drafter: Path) -> list[Method]:
    """What is compared; a drafter of random weights is written where one is asked for."""
    methods = plan(args.drafter, args.concurrency, args.shape, args.ngram_tokens, args.adaptive)
    if args.random_drafter:
        methods += with_random_drafter(methods, str(random_drafter))
    check_checkpoint(args.drafter)
    if args.random_drafter:
        write_random_drafter(args.drafter, random_drafter, args.seed)
    return methods


def _check_outputs(args: argparse.Namespace) -> None:
    """An hour of measuring shall not end at a folder that does not exist."""
    for option, path in (("--output", args.output), ("--plot", args.plot)):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{option} {path}: no such folder")


def _prompts(args: argparse.Namespace, console: Console) -> list[list[int]]:
    """The token ids to start from, the same for all engines."""
    if bool(args.prompt) == bool(args.dataset):
        raise InputError("give prompts with either --prompt or --dataset")
    if any(not prompt.strip() for prompt in args.prompt):
        raise InputError("--prompt is empty")
    prompts, left_out = read_dataset(args.dataset) if args.dataset else (args.prompt, 0)
    if left_out:
        console.print(f"{args.dataset.name}: {left_out} conversations without a user's turn")
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        config = AutoConfig.from_pretrained(args.model).get_text_config()
    except (OSError, ValueError) as error:
        raise InputError(f"--model {args.model}: {error}") from error
    most = args.max_model_len or getattr(config, "max_position_embeddings", None)
    longest = None if most is None else most - args.max_tokens
    tokens = tokenize(prompts, tokenizer, args.chat)
    chosen = choose(tokens, args.num_prompts, longest, max(args.concurrency), args.seed)
    console.print(f"{len(chosen)} prompts, {sum(map(len, chosen)) / len(chosen):.0f} tokens each")
    return chosen


def _compare(
    args: argparse.Namespace, methods: list[Method], prompts: list[list[int]], console: Console
) -> None:
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    gpu = None if is_cpu else current_platform.get_device_name()
    variables = environment(is_cpu)
    settings = _settings(args, prompts, variables)
    if is_cpu and any(args.temperature):
        console.print(NGRAM_NOTE)
        settings["note"] = NGRAM_NOTE
    entries = _entries(args, methods, prompts, is_cpu)
    report: dict[str, Any] = {**machine.describe(gpu), "settings": settings}
    measured: list[Measurement] = []
    with _bar(args.repeats, entries, console) as update, ExitStack() as stack:
        measure_all = (
            partial(in_turns, entries, start_all(entries, variables, stack, update), update)
            if is_cpu
            else partial(one_by_one, entries, variables, update)
        )
        for repeat in range(args.repeats):
            update(repeat=repeat + 1)
            runs = measure_all(repeat)
            for entry in entries:
                measured += measurements(entry.method, repeat, runs[entry.label], runs["plain"])
            rows = summarise(measured)
            report["rows"] = [asdict(row) for row in rows]
            report["measurements"] = [asdict(m) for m in measured]
            # After each repeat: should a later one fail, this much is not lost.
            results.write(args.output, report)
    print_table(rows, settings, Console())
    if args.plot:
        from throughput_parts.plot import plot

        device = gpu or report["machine"]["cpu"]
        plot(rows, f"{settings['model']} ({settings['dtype']}) on {device}", args.plot)


@contextmanager
def _bar(repeats: int, entries: Sequence[Entry], console: Console) -> Iterator[Callable[..., None]]:
    """A progress bar; yields what updates its `repeat` and `description`, or lets it `advance`."""
    with Progress(
        TextColumn(f"repeat {{task.fields[repeat]}} of {repeats}, {{task.description}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        total = repeats * sum(len(entry.cases) for entry in entries)
        yield partial(progress.update, progress.add_task("", total=total, repeat=1))


def start_all(
    entries: Sequence[Entry],
    variables: dict[str, str],
    stack: ExitStack,
    update: Callable[..., None],
) -> dict[str, EngineProcess]:
    """By label, each entry's engine, started and paused; they end with the stack.

    Raises:
        EngineError: one failed.
    """
    engines = {}
    for entry in entries:
        update(description=f"start of {entry.label}")
        engine = stack.enter_context(EngineProcess(entry.job, variables))
        engine.wait_until_started()
        engine.pause()
        engines[entry.label] = engine
    return engines


def in_turns(
    entries: Sequence[Entry],
    engines: Mapping[str, EngineProcess],
    update: Callable[..., None],
    repeat: int,
) -> dict[str, list[Run]]:
    """One repeat on paused engines: of each case, all methods' measurements in a row.

    Raises:
        EngineError: one failed.
    """
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


def one_by_one(
    entries: Sequence[Entry],
    variables: dict[str, str],
    update: Callable[..., None],
    repeat: int,
) -> dict[str, list[Run]]:
    """One repeat with a fresh engine after the other, each with all of its cases.

    Raises:
        EngineError: one failed.
    """
    runs: dict[str, list[Run]] = {entry.label: [] for entry in entries}
    for entry in rotated(entries, repeat):
        update(description=entry.label)
        job = replace(entry.job, seed=entry.job.seed + repeat)
        with EngineProcess(job, variables) as engine:
            engine.wait_until_started()
            for case in entry.cases:
                runs[entry.label].append(engine.measure(case))
                update(advance=1)
    return runs


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Each turn starts with another item, so that none always meets the same conditions."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def _entries(
    args: argparse.Namespace, methods: Sequence[Method], prompts: list[list[int]], is_cpu: bool
) -> list[Entry]:
    """All methods that can be measured here at one of the temperatures at least."""
    entries = []
    for method in methods:
        temperatures = method.temperatures(args.temperature, is_cpu)
        cases = [
            Case(level, temperature) for temperature in temperatures for level in method.levels
        ]
        if cases:
            entries.append(Entry(method, cases, _job(args, method, prompts)))
    return entries


def _job(args: argparse.Namespace, method: Method, prompts: list[list[int]]) -> Job:
    engine = {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(method.levels),
        "enforce_eager": args.enforce_eager,
        # Every level answers the same prompts: later ones would find them in the cache.
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # its counters are read
        "speculative_config": method.speculative_config,
        **args.engine_args,
    }
    return Job(
        engine=engine,
        seed=args.seed,
        prompts=prompts,
        prompts_per_request=args.prompts_per_request,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        timed_parts=method.drafts_with_redrafter,
    )


def _settings(
    args: argparse.Namespace, prompts: list[list[int]], variables: dict[str, str]
) -> dict[str, Any]:
    """What was asked for, without this machine's paths."""
    settings = {k: v for k, v in vars(args).items() if k not in ("output", "plot", "no_adaptive")}
    for name in ("model", "drafter"):
        given = Path(settings[name])
        settings[name] = given.resolve().name if given.is_dir() else settings[name]
    settings["dataset"] = args.dataset.name if args.dataset else None
    settings["num_prompts"] = len(prompts)
    settings["prompt_tokens"] = sum(map(len, prompts))
    preloaded = variables.get("LD_PRELOAD", "")
    settings["environment"] = {
        **variables,
        "LD_PRELOAD": [Path(library).name for library in preloaded.split(":") if library],
    }
    return settings


if __name__ == "__main__":
    main()
