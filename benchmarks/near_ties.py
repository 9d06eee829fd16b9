r"""How often a near-tie falls differently with ReDrafter, and whether anything is lost by it.

    python benchmarks/near_ties.py --model TARGET --drafter DRAFTER --num-prompts 8 \
        --output near-ties.json

A step with more rows is computed in another order, and rounded otherwise. Where the two best
tokens are nearly as probable, the other one may come out, and the answer goes on from there: with
ReDrafter, and just so when plain vLLM batches other requests. The suites' prompts are answered
greedily in each dtype,

- by plain decoding, one request at a time: the reference,
- by plain decoding with `--in-flight` requests at once,
- with ReDrafter (adaptive), both ways,

and the table has how many answers are the reference's. In float32 all should be. The last column
is the mean log-probability of the answers' tokens under the target, computed with transformers in
float32: if it is the same, nothing was lost but the toss of a coin.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from near_ties_parts.agreement import Agreement, Judge
from rich.console import Console
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import positive, script_parser, tree_shape
from throughput_parts.engine import Case, Job
from throughput_parts.methods import InputError
from throughput_parts.process import EngineError, EngineProcess, environment
from throughput_parts.prompts import choose, tokenize
from throughput_parts.suites import ALL, read_suites

DTYPES = ("bfloat16", "float32")


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="the target: folder or hub id")
    add("--drafter", required=True, help="the ReDrafter checkpoint: folder or hub id")
    add("--suite", nargs="+", default=[ALL], help="chat, summary, code, math (default all)")
    add("--num-prompts", type=positive, default=32, help="per suite, at most (default 32)")
    add("--max-tokens", type=positive, default=64, help="of an answer (default 64)")
    add("--max-model-len", type=positive, default=1024, help="vLLM's (default 1024)")
    add("--in-flight", type=positive, default=8, help="requests at once (default 8)")
    add("--shape", type=tree_shape, default=(4, 4, 12), metavar="WxL:K", help="(default 4x4:12)")
    add("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    add("--output", type=Path, help="write all figures to this JSON file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        found = list(measure(args, prompts(args)))
    except (InputError, EngineError) as error:
        raise SystemExit(str(error)) from error
    Console(width=results.TABLE_WIDTH).print(table(found))
    settings = {**vars(args), "output": None, "model": Path(args.model).name}
    settings["drafter"] = Path(args.drafter).name
    record = {**machine.describe(gpu=None), "settings": settings}
    results.write(args.output, {**record, "measurements": [asdict(row) for row in found]})


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """The suites' prompts by the target's chat template, as token ids."""
    from transformers import AutoTokenizer

    from vllm_redrafter.data.vocabulary import EmbeddedTokens

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    embedded = EmbeddedTokens.of(args.model, tokenizer)
    longest = args.max_model_len - args.max_tokens
    chosen = []
    for asked in read_suites(args.suite).values():
        tokens, left_out = tokenize(asked, tokenizer, embedded, chat=True)
        if left_out.count:
            Console().print(str(left_out), markup=False, highlight=False, soft_wrap=True)
        chosen += choose(tokens, args.num_prompts, longest, at_least=1, seed=0)
    return chosen


def measure(args: argparse.Namespace, asked: list[list[int]]) -> Iterator[Agreement]:
    """Every way to decode, in every dtype, one engine after the other."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.platforms import current_platform

    judge = Judge(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval())
    variables = environment(current_platform.is_cpu())
    width, length, nodes = args.shape
    drafted = {
        "model": args.drafter,
        "beam_width": width,
        "beam_length": length,
        "num_speculative_tokens": nodes,
    }
    for dtype in args.dtype:
        reference: list[list[int]] = []
        for method, speculation in (("plain", None), ("ReDrafter", drafted)):
            job = job_of(args, asked, dtype, speculation)
            with EngineProcess(job, variables) as engine:
                engine.wait_until_started()
                for in_flight in (1, args.in_flight):
                    answers = engine.measure(Case(in_flight, 0.0)).generation.outputs
                    reference = reference or answers
                    equal = sum(a == b for a, b in zip(answers, reference, strict=True))
                    mean = judge.mean(asked, answers)
                    yield Agreement(dtype, method, in_flight, equal, len(answers), mean)


def job_of(
    args: argparse.Namespace,
    asked: list[list[int]],
    dtype: str,
    speculation: dict[str, Any] | None,
) -> Job:
    engine = {
        "model": args.model,
        "dtype": dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.in_flight,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # its counters are read
        "speculative_config": speculation,
    }
    return Job(
        engine=engine,
        seed=0,
        prompts=asked,
        prompts_per_request=None,
        max_tokens=args.max_tokens,
        ignore_eos=False,
        timed_parts=False,
    )


def table(found: list[Agreement]) -> Table:
    made = Table(title="Greedy answers beside plain decoding's of one request at a time")
    for column in ("dtype", "method"):
        made.add_column(column)
    for column in ("in flight", "equal", "log-probability of a token"):
        made.add_column(column, justify="right")
    for row in found:
        made.add_row(
            row.dtype,
            row.method,
            str(row.in_flight),
            f"{row.equal} of {row.answers} ({row.equal / row.answers:.0%})",
            f"{row.log_probability:.4f}",
        )
    return made


if __name__ == "__main__":
    main()
