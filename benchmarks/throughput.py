# SPDX-License-Identifier: Apache-2.0
r"""Plain decoding, ReDrafter and vLLM's own speculative methods side by side.

    python benchmarks/throughput.py --model TARGET --drafter DRAFTER --dataset prompts.jsonl \
        --concurrency 1 4 8 --shape 2x4:8 1x3:3 --adaptive 4x5:12 --output results.json

ReDrafter comes in fixed shapes, whose K nodes are verified in every step, and adaptive: a step
verifies as many nodes as pay, or none. `--method JSON` measures one of vLLM's own methods beside
them, given as its speculative config; it can be repeated:

    --method '{"method": "eagle3", "model": "EAGLE", "num_speculative_tokens": 3}' \
    --method '{"method": "suffix", "num_speculative_tokens": 12}'
    --method '{"method": "redrafter", "num_speculative_tokens": 12,
               "draft": {"method": "eagle3", "model": "EAGLE", "num_speculative_tokens": 3}}'

The last one is vLLM's drafter in a tree of ours. Without --drafter, no ReDrafter is measured.

Prompts are asked again at every level and in every repeat. So before each measurement an engine
forgets what it keeps across requests: prefixes, and answers, ReDrafter's and suffix decoding's.

Several drafters of a target are compared in one run: --drafter ONE OTHER.

`--stream` asks traffic of one kind, as a server has it all day: the prompts of each task in their
order, by default those of streams.jsonl. What earlier answers bring then, by our own settings:

    --stream --matches-alone --settings '{"earlier_answers": 0}' '{}'

A dataset whose rows have a `category`, as MT-Bench's and the prompts that come with this script, is
divided by it: there are figures of each task, and of all.

Every method and shape gets an engine of its own, and all answer the same prompts, after a warm-up
of one answer per request in flight. On a CPU all engines have memory at the same time and take
turns: at each concurrency and temperature one measurement follows the other within seconds, with
the other engines paused, so that whatever slows the machine down meets all methods alike. A GPU has
no memory for two, mostly: there each engine does all of a repeat alone, in a fresh process, unless
--side-by-side says that there is. The adaptive method keeps what it has learned for as long as its
engine lives, as in a server.

Requests that all end after --max-tokens begin and end together in plain decoding, whose prompts are
then read several in a pass, and not in speculation. With --min-tokens their lengths differ, as
those of answers do.

Targets loop under greedy decoding, small ones above all, and repeated text is easy to draft, for
n-grams most of all. So the table has the share of repeated 8-grams beside the figures.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from shared_parts import machine, results
from shared_parts.arguments import shape_text
from throughput_parts.arguments import parsed, parser
from throughput_parts.engine import Case, Job
from throughput_parts.methods import GREEDY_NOTE, Method, plan
from throughput_parts.process import EngineError, environment
from throughput_parts.prompts import TokensByTask, choose, read_dataset, tokenize
from throughput_parts.report import Measurement, measurements, summarise, with_totals
from throughput_parts.table import print_table
from throughput_parts.turns import Entry, alone, side_by_side

from vllm_redrafter import ConfigError
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.data.conversation_rows import LeftOut


def main(argv: Sequence[str] | None = None) -> None:
    command = parser(__doc__)
    args = parsed(command, argv)
    console = Console(stderr=True)
    try:
        methods = plan(
            args.drafter,
            args.shape,
            args.adaptive,
            args.method,
            args.settings,
            args.matches_alone,
            args.plain_again,
        )
        for drafter in args.drafter:
            Checkpoint.open(drafter).checked()
        prompts = _prompts(args, console)
    except ConfigError as error:
        command.error(str(error))
    try:
        _compare(args, methods, prompts, console)
    except EngineError as error:
        sys.exit(str(error))


def _prompts(args: argparse.Namespace, console: Console) -> TokensByTask:
    """The token ids to start from, the same for all engines."""
    asked, left_out = read_dataset(args.dataset)
    _print_left_out(left_out, console)
    from transformers import AutoConfig, AutoTokenizer

    from vllm_redrafter.data.target import EmbeddedTokens

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        config = AutoConfig.from_pretrained(args.model).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {args.model}: {error}") from error
    most = args.max_model_len or getattr(config, "max_position_embeddings", None)
    longest = None if most is None else most - args.max_tokens
    embedded = EmbeddedTokens(tokenizer, config.vocab_size)
    chosen: TokensByTask = {}
    for task, prompts in asked.items():
        tokens, left_out = tokenize(prompts, tokenizer, embedded, args.chat)
        _print_left_out(left_out, console)
        of_task = "" if task is None else f"{task}: "
        try:
            kept = choose(tokens, args.num_prompts, longest, None if args.stream else args.seed)
        except ConfigError as error:
            raise ConfigError(f"{of_task}{error}") from error
        length = sum(map(len, kept)) / len(kept)
        console.print(f"{of_task}{len(kept)} prompts, {length:.0f} tokens each", markup=False)
        chosen[task] = kept
    return chosen


def _print_left_out(left_out: LeftOut, console: Console) -> None:
    if left_out.count:
        console.print(str(left_out), markup=False, highlight=False, soft_wrap=True)


def _compare(
    args: argparse.Namespace, methods: list[Method], prompts: TokensByTask, console: Console
) -> None:
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    gpu = None if is_cpu else current_platform.get_device_name()
    variables = environment(is_cpu)
    settings = _settings(args, prompts, variables)
    if is_cpu and any(args.temperature) and args.method:
        console.print(GREEDY_NOTE)
        settings["note"] = GREEDY_NOTE
    entries = _entries(args, methods, prompts, is_cpu)
    report: dict[str, Any] = {**machine.describe(gpu), "settings": settings}
    measured: list[Measurement] = []
    with Progress(console=console) as progress:
        measurements_in_all = args.repeats * sum(len(entry.cases) for entry in entries)
        update = partial(progress.update, progress.add_task("", total=measurements_in_all))
        all_runs = (
            side_by_side(entries, variables, update, args.repeats, at_once=not is_cpu)
            if is_cpu or args.side_by_side
            else alone(entries, variables, update, args.repeats)
        )
        for repeat, found in enumerate(all_runs):
            runs = {label: with_totals(of_method) for label, of_method in found.items()}
            for entry in entries:
                measured += measurements(entry.method, repeat, runs[entry.label], runs["plain"])
            rows = summarise(measured)
            report["rows"] = [asdict(row) for row in rows]
            report["measurements"] = [asdict(m) for m in measured]
            # After each repeat: should a later one fail, this much is not lost.
            results.write(args.output, report)
    print_table(rows, settings, Console())


def _entries(
    args: argparse.Namespace, methods: Sequence[Method], prompts: TokensByTask, is_cpu: bool
) -> list[Entry]:
    """All methods that can be measured here at one of the temperatures at least."""
    entries = []
    for method in methods:
        temperatures = method.temperatures(args.temperature, is_cpu)
        cases = [
            Case(level, temperature, task)
            for temperature in temperatures
            for level in args.concurrency
            for task in prompts
        ]
        if cases:
            entries.append(Entry(method, cases, _job(args, method, prompts), _log(args, method)))
    return entries


def _log(args: argparse.Namespace, method: Method) -> Path | None:
    """The file of its engines' log, emptied, beside the results."""
    if args.output is None:
        return None
    name = re.sub(r"[^\w.]+", "-", f"{args.output.stem} {method.label}")
    log: Path = args.output.with_name(f"{name}.log")
    log.write_text("")
    return log


def _job(args: argparse.Namespace, method: Method, prompts: TokensByTask) -> Job:
    engine = {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.concurrency),
        "disable_log_stats": False,  # its counters are read
        "speculative_config": method.speculative_config,
        **args.engine_args,
    }
    return Job(
        engine=engine,
        seed=args.seed,
        prompts=list(chain.from_iterable(prompts.values())),
        prompts_per_request=args.prompts_per_request,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        tasks=[task for task, found in prompts.items() for _ in found],
        min_tokens=args.min_tokens,
    )


def _settings(
    args: argparse.Namespace, prompts: TokensByTask, variables: dict[str, str]
) -> dict[str, Any]:
    """What was asked for, without this machine's paths."""
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    settings["method"] = deepcopy(args.method)
    for name in ("shape", "adaptive"):
        settings[name] = [shape_text(shape) for shape in settings[name]]
    settings["drafter"] = [*map(_without_path, args.drafter)]
    of_trees = [each["draft"] for each in settings["method"] if "draft" in each]
    for where in (settings, *settings["method"], *of_trees):
        if "model" in where:
            where["model"] = _without_path(where["model"])
    settings["dataset"] = args.dataset.name
    answered = list(chain.from_iterable(prompts.values()))
    settings["num_prompts"] = len(answered)
    settings["prompt_tokens"] = sum(map(len, answered))
    preloaded = variables.get("LD_PRELOAD", "")
    settings["environment"] = {
        **variables,
        "LD_PRELOAD": [Path(library).name for library in preloaded.split(":") if library],
    }
    return settings


def _without_path(model: str) -> str:
    return given.resolve().name if (given := Path(model)).is_dir() else model


if __name__ == "__main__":
    main()
