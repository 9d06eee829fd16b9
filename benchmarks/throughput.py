r"""Plain decoding, ReDrafter and vLLM's n-gram speculation side by side.

    python benchmarks/throughput.py --model TARGET --drafter DRAFTER --dataset prompts.jsonl \
        --concurrency 1 4 8 --shape 1=2x4:8 4=2x3:4 8=1x3:3 --adaptive 4x5:12 \
        --output results.json --plot out.png

ReDrafter comes in fixed shapes, whose K nodes are verified in every step, and adaptive: a step
verifies as many nodes as pay, or none. With --random-drafter it is measured with a drafter of
random weights as well, for what a useless one costs.

Every method and shape gets an engine of its own, in a fresh process; `--repeats` does all of it
again, each time in another order. At a concurrency (that many requests in flight) and temperature
all engines answer the same prompts, after a warm-up, without prefix caching.

Targets loop under greedy decoding, small ones above all, and repeated text is easy to draft, for
n-grams most of all. So the table has the share of repeated 8-grams beside the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from shared_parts import machine, results
from shared_parts.arguments import json_object, not_negative, positive, script_parser
from throughput_parts.engine import Job, Run
from throughput_parts.methods import NGRAM_NOTE, InputError, Method, plan, with_random_drafter
from throughput_parts.process import EngineError, environment, run_engine
from throughput_parts.prompts import choose, read_dataset, tokenize
from throughput_parts.random_drafter import write_random_drafter
from throughput_parts.report import Measurement, measurements, print_table, summarise

from vllm_redrafter import ConfigError
from vllm_redrafter.checkpoints.reading import check_checkpoint


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
    temperatures = {m.label: m.temperatures(args.temperature, is_cpu) for m in methods}
    methods = [method for method in methods if temperatures[method.label]]
    report: dict[str, Any] = {**machine.describe(gpu), "settings": settings}
    measured: list[Measurement] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        runs_per_repeat = sum(len(m.levels) * len(temperatures[m.label]) for m in methods)
        task = progress.add_task("", total=args.repeats * runs_per_repeat)
        for repeat in range(args.repeats):
            runs: dict[str, list[Run]] = {}
            for method in rotated(methods, repeat):
                shown = f"repeat {repeat + 1} of {args.repeats}, {method.label}"
                progress.update(task, description=shown)
                job = _job(args, method, temperatures[method.label], repeat, prompts)
                runs[method.label] = run_engine(job, variables, lambda: progress.advance(task))
            for method in methods:
                measured += measurements(method, repeat, runs[method.label], runs["plain"])
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


def rotated(methods: Sequence[Method], repeat: int) -> list[Method]:
    """Each repeat starts with another method, so that none always meets the same conditions."""
    start = repeat % len(methods)
    return [*methods[start:], *methods[:start]]


def _job(
    args: argparse.Namespace,
    method: Method,
    temperatures: list[float],
    repeat: int,
    prompts: list[list[int]],
) -> Job:
    engine = {
        "model": args.model,
        "dtype": args.dtype,
        # Requests have no seed of their own, as most in practice; other samples in each repeat.
        "seed": args.seed + repeat,
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
        prompts=prompts,
        prompts_per_request=args.prompts_per_request,
        levels=list(method.levels),
        temperatures=temperatures,
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
