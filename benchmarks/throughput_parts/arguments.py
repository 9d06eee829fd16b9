# SPDX-License-Identifier: Apache-2.0
"""What throughput.py is asked to compare, on which prompts, and how often."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_parts.arguments import (
    json_object,
    not_negative,
    own_settings,
    positive,
    script_parser,
    tree_shape,
)

from throughput_parts.methods import NGRAM
from throughput_parts.prompts import STREAMS, SUITES


def parser(doc: str | None) -> argparse.ArgumentParser:
    """`doc` is the script's docstring, which --help shows."""
    made = script_parser(doc, output="measurements; engines' logs lie beside them")
    add = made.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    or_none: dict[str, Any] = {"nargs": "*", "action": "extend"}
    add("--model", required=True, help="the target: folder or hub id")
    which = "ReDrafter checkpoints, one or several: folders or hub ids"
    add("--drafter", **several, default=[], help=which)
    add(
        "--dataset",
        type=Path,
        help="prompts: .txt (one per line), .jsonl, .json, .parquet; MT-Bench's and Spec-Bench's "
        "question.jsonl, prepared SPEED-Bench and GSM8K's files as they are (default: suites.jsonl "
        "beside this script, or streams.jsonl for --stream)",
    )
    stream = "ask the prompts of each task in their order, by default all of them"
    add("--stream", action="store_true", help=stream)
    chat = "put prompts through the target's chat template (default: only conversations)"
    add("--chat", action=argparse.BooleanOptionalAction, help=chat)
    number = "at most, drawn at random, of each task where there are some (default 32)"
    add("--num-prompts", type=positive, help=number)
    add(
        "--prompts-per-request",
        type=positive,
        metavar="N",
        help="answer only N prompts (of each task) per request in flight, but 32 in all, so that "
        "low concurrency does not take longest (default: all prompts at every concurrency)",
    )
    add("--max-tokens", type=positive, default=128, help="per request (default 128)")
    least = "draw the most tokens of each request from here to --max-tokens (default: no draw)"
    add("--min-tokens", type=positive, help=least)
    add("--ignore-eos", action="store_true", help="output as many in any case")
    add("--concurrency", **several, type=positive, help="requests in flight (default 1 4 8)")
    shape: dict[str, Any] = {"type": tree_shape, "metavar": "WxL:K"}
    fixed = "fixed beam width, beam length, tree nodes (default 2x4:6; or none)"
    add("--shape", **or_none, **shape, help=fixed)
    add("--adaptive", **several, **shape, help="the same, at most (default 4x5:12)")
    add(
        "--settings",
        **several,
        type=own_settings,
        metavar="JSON",
        help="measure our methods with each of these parts of a speculative config, such as "
        '{"context_matches": 0} (default: once, with the engine\'s own)',
    )
    alone = "continuations found in texts, without a drafter, as well, with K of --adaptive"
    add("--matches-alone", action="store_true", help=alone)
    again = "plain decoding in a second engine: how much the figures of two like engines differ"
    add("--plain-again", action="store_true", help=again)
    add(
        "--method",
        **or_none,
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
    add("--seed", type=int, default=0, help="of the choice of prompts and of sampling (default 0)")
    add("--dtype", default="auto", help="vLLM's (default auto)")
    add("--max-model-len", type=positive, help="vLLM's")
    more = "more arguments of vllm.LLM"
    add("--engine-args", type=json_object, default={}, metavar="JSON", help=more)
    return made


def parsed(command: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """With the defaults of what can be repeated; ends the script where two contradict."""
    args = command.parse_args(argv)
    # Not argparse defaults: `extend` would add to them.
    args.concurrency = sorted(set(args.concurrency or [1, 4, 8]))
    if not args.drafter and args.shape:
        command.error("--shape needs a drafter of ours: give --drafter, or leave it out")
    args.shape = [tree_shape("2x4:6")] if args.shape is None else [*dict.fromkeys(args.shape)]
    args.adaptive = [*dict.fromkeys(args.adaptive or [tree_shape("4x5:12")])]
    args.settings = args.settings or [{}]
    args.dataset = args.dataset or (STREAMS if args.stream else SUITES)
    args.num_prompts = args.num_prompts or (sys.maxsize if args.stream else 32)
    args.method = [NGRAM] if args.method is None else args.method
    args.temperature = sorted(set(args.temperature or [0.0, 0.7]))
    if (args.min_tokens or 0) > args.max_tokens:
        command.error(
            f"--min-tokens {args.min_tokens} is more than --max-tokens {args.max_tokens}: "
            "give at most as many"
        )
    return args
