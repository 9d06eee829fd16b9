"""What throughput.py is asked to compare, on which prompts, and how often."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_parts.arguments import (
    integer,
    json_object,
    not_negative,
    positive,
    results_file,
    script_parser,
)

from throughput_parts.methods import NGRAM
from throughput_parts.suites import ALL, SUITES
from vllm_redrafter.config import MOST_MATCHES


def parser(doc: str | None) -> argparse.ArgumentParser:
    """`doc` is the script's docstring, which --help shows."""
    made = script_parser(doc)
    add = made.add_argument
    add("--model", required=True, help="the target: folder or hub id")
    add("--drafter", required=True, help="the ReDrafter checkpoint: folder or hub id")
    add(
        "--dataset",
        type=Path,
        help="prompts: .txt (one per line), .jsonl, .json, .parquet; MT-Bench's and "
        "Spec-Bench's question.jsonl and GSM8K's files as they are",
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add(
        "--suite",
        **several,
        metavar="NAME",
        help=f"prompts that come with this script: {', '.join(SUITES)}, or {ALL}; figures by task",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put prompts through the target's chat template (default: only conversations; "
        "--suite implies --chat)",
    )
    add(
        "--num-prompts",
        type=positive,
        default=32,
        help="at most, drawn at random, of each task where there are some (default 32, which is "
        "all of any suite)",
    )
    add(
        "--prompts-per-request",
        type=positive,
        metavar="N",
        help="answer only N prompts (of each task) per request in flight, so that low concurrency "
        "does not take longest (default: all prompts at every concurrency)",
    )
    add("--max-tokens", type=positive, default=128, help="per request (default 128)")
    add(
        "--min-tokens",
        type=positive,
        help="draw the most tokens of each request from here to --max-tokens (default: "
        "--max-tokens of all)",
    )
    add("--ignore-eos", action="store_true", help="output as many in any case")
    add("--concurrency", **several, type=positive, help="requests in flight (default 1 4 8)")
    add(
        "--shape",
        **{**several, "nargs": "*"},
        metavar="[C=]WxL:K",
        help="fixed beam width, beam length, tree nodes; C= for concurrency C only (default 2x4:6; "
        "none where nothing is given)",
    )
    add(
        "--adaptive",
        **several,
        metavar="WxL:K",
        help="the adaptive method's maxima of the same (default 4x5:12)",
    )
    add(
        "--context-matches",
        **several,
        type=integer(0, MOST_MATCHES),
        default=[],
        metavar="M",
        help="measure each fixed and adaptive shape with each of these numbers of continuations "
        "found in the text (default: once, with the engine's own default)",
    )
    add(
        "--matches-alone",
        action="store_true",
        help="these continuations without a drafter as well, with K of --adaptive",
    )
    add(
        "--plain-again",
        action="store_true",
        help="plain decoding in a second engine: how much the figures of two like engines differ",
    )
    add(
        "--random-drafter",
        action="store_true",
        help="the adaptive method with a drafter of random weights as well",
    )
    add(
        "--method",
        **{**several, "nargs": "*"},
        type=json_object,
        metavar="JSON",
        help="a speculative config of one of vLLM's own methods, to be measured as well (default: "
        "n-gram speculation of five tokens; none where nothing is given)",
    )
    add(
        "--side-by-side",
        action="store_true",
        help="on a GPU all engines at once as well, as far as its memory goes: give each its part "
        "by --engine-args, in gpu_memory_utilization and kv_cache_memory_bytes",
    )
    add("--temperature", **several, type=not_negative, help="(default 0 0.7)")
    add("--repeats", type=positive, default=3, help="of everything (default 3)")
    add(
        "--starts",
        type=positive,
        default=1,
        help="start the engines anew so many times, for --repeats each (default 1)",
    )
    add("--seed", type=int, default=0, help="of the choice of prompts and of sampling (default 0)")
    add("--dtype", default="auto", help="vLLM's (default auto)")
    add("--max-model-len", type=positive, help="vLLM's")
    add(
        "--engine-args",
        type=json_object,
        default={},
        metavar="JSON",
        help="more arguments of vllm.LLM",
    )
    add("--output", type=results_file, help="write all measurements to this JSON file")
    return made


def parsed(command: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """With the defaults of what can be repeated; ends the script where two contradict."""
    args = command.parse_args(argv)
    # Not argparse defaults: `extend` would add to them.
    args.concurrency = args.concurrency or [1, 4, 8]
    args.shape = ["2x4:6"] if args.shape is None else args.shape
    args.adaptive = args.adaptive or ["4x5:12"]
    args.method = [NGRAM] if args.method is None else args.method
    if (args.min_tokens or 0) > args.max_tokens:
        command.error(
            f"--min-tokens {args.min_tokens} is more than --max-tokens {args.max_tokens}: "
            "give at most as many"
        )
    if args.suite and args.chat is None:
        args.chat = True
    args.temperature = sorted(set(args.temperature or [0.0, 0.7]))
    return args
