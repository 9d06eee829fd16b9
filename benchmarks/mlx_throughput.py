# SPDX-License-Identifier: Apache-2.0
"""How fast does ReDrafter decode on MLX, beside mlx-lm's own decoding, and are answers the same?

    python benchmarks/mlx_throughput.py TARGET DRAFTER --output mlx.json
    python benchmarks/mlx_throughput.py TARGET DRAFTER --shape 4x4:7 --temperature 0.7

One request after the other, each answered by mlx-lm alone, by ReDrafter with --adaptive, and with
each --shape, which verifies K nodes at every step. Nothing ends an answer but its length. Seconds
are those of the answer; the prompt's are left out, and so is the drafter's own start-up.

Answers are compared token by token with mlx-lm's, if greedy; sampled ones with those of the first
method, as the same seed gives the same answer whatever is drafted, and mlx-lm draws otherwise.

At the end, what a pass of 1 to K + 1 rows takes and a search, as measured when a drafter is loaded.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_sampler
from rich.console import Console
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import not_negative, positive, script_parser, shape_text, tree_shape
from throughput_parts.prompts import SUITES, read_dataset, tokenize

from vllm_redrafter import ConfigError
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.data.target import EmbeddedTokens
from vllm_redrafter.mlx import load_drafter, stream_generate
from vllm_redrafter.mlx.target import check_rope

PLAIN, ADAPTIVE = "mlx-lm", "adaptive"
SEED = 0


@dataclass
class Row:
    """One method on the prompts of one task.

    Attributes:
        identical: answers that equal those compared with, of as many as there are.
    """

    task: str | None
    method: str
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    identical: int = 0
    answers: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("target", help="a model of mlx-lm: a folder or a hub id")
    add("drafter", help="its drafter")
    dataset = "conversations, as throughput.py reads them (default: its own)"
    add("--dataset", type=Path, default=SUITES, help=dataset)
    add("--num-prompts", type=positive, default=32, help="of each task at most (default 32)")
    add("--max-tokens", type=positive, default=64, help="of each answer (default 64)")
    add("--temperature", type=not_negative, default=0.0, help="(default 0)")
    add("--adaptive", type=tree_shape, default="4x4:7", metavar="WxL:K", help="(default 4x4:7)")
    add("--shape", type=tree_shape, nargs="*", default=[], metavar="WxL:K", help="fixed ones")
    args = parser.parse_args(argv)
    try:
        run(args)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


def run(args: argparse.Namespace) -> None:
    model, tokenizer = mlx_lm.load(args.target)
    check_rope(args.target, read_config(args.target), model.args)
    tokenizer.eos_token_ids = set()  # nothing ends an answer
    drafters: dict[str, Any] = {PLAIN: None}
    for name, shape in ((ADAPTIVE, args.adaptive), *((shape_text(s), s) for s in args.shape)):
        sizes = "num_speculative_tokens", "beam_width", "beam_length"
        given: dict[str, Any] = {of: getattr(shape, of) for of in sizes}
        drafters[name] = load_drafter(args.drafter, model, **given, adaptive=name == ADAPTIVE)
    embedded = EmbeddedTokens(tokenizer._tokenizer, drafters[ADAPTIVE].target.vocab_size)
    rows, console = [], results.wide_console()
    for task, asked in read_dataset(args.dataset)[0].items():
        prompts, _ = tokenize(asked, tokenizer._tokenizer, embedded, chat=None)
        found = {name: Row(task, name) for name in drafters}
        for prompt in prompts[: args.num_prompts]:
            compare(prompt, model, tokenizer, drafters, found, args)
        rows += found.values()
        print_table(rows, console)
    costs = drafters[ADAPTIVE].drafting.planner.times.table
    console.print("a pass, by rows:", costs.verify, "\na draft:", costs.draft, highlight=False)
    shapes = {"adaptive": shape_text(args.adaptive), "shape": [*map(shape_text, args.shape)]}
    asked_for = {name: vars(args)[name] for name in ("num_prompts", "max_tokens", "temperature")}
    record = {
        **machine.describe(None),
        "settings": {**asked_for, **shapes, "dataset": args.dataset.name},
        "rows": [asdict(row) for row in rows],
        "verify": costs.verify,
        "draft": costs.draft,
    }
    results.write(args.output, record)


def compare(
    prompt: list[int],
    model: Any,
    tokenizer: Any,
    drafters: dict[str, Any],
    found: dict[str, Row],
    args: argparse.Namespace,
) -> None:
    """Add all methods' answers to one prompt to their rows."""
    answers: dict[str, list[int]] = {}
    for name, drafter in drafters.items():
        mx.random.seed(SEED)
        sampler = make_sampler(args.temperature)
        row, tokens, started = found[name], [], 0.0
        for response in stream_generate(
            model, tokenizer, prompt, args.max_tokens, drafter, sampler=sampler
        ):
            if not tokens:
                started = perf_counter()
            tokens.append(response.token)
            row.steps += not response.from_draft
        row.seconds += perf_counter() - started
        row.tokens += len(tokens)
        answers[name] = tokens
        standard = ADAPTIVE if args.temperature else PLAIN
        row.identical += tokens == answers.get(standard, tokens)
        row.answers += 1


def print_table(rows: Sequence[Row], console: Console) -> None:
    table = Table("task", "method", "tokens/s", "× mlx-lm", "tokens per step", "identical")
    plain = {row.task: row for row in rows if row.method == PLAIN}
    for row in rows:
        rate = row.tokens / row.seconds
        base = plain[row.task].tokens / plain[row.task].seconds
        per_step, same = f"{row.tokens / row.steps:.3f}", f"{row.identical}/{row.answers}"
        figures = f"{rate:.1f}", f"{rate / base:.2f}", per_step, same
        table.add_row(row.task or "", row.method, *figures)
    console.print(table)


if __name__ == "__main__":
    main()
