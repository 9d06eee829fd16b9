# SPDX-License-Identifier: Apache-2.0
"""The demo, in order: SmolLM2-135M-Instruct, two engines, what they answer and how fast."""

import os
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint, shape_of
from vllm_redrafter.checkpoints.shipped import shipped_drafter
from vllm_redrafter.cli.chat.conversation import DRAFTED
from vllm_redrafter.cli.demo.engine import Decoded, Job, Round, decode_in_vllm
from vllm_redrafter.cli.demo.smollm2_target import get_target
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.target import EmbeddedTokens, Target
from vllm_redrafter.data.turns import PromptRenderer
from vllm_redrafter.utils.processor import fast_dtype
from vllm_redrafter.utils.progress import progress_bar

NAME = "smollm2-135m-instruct"
"""Of the target's folder in the cache, and of its drafter in the package."""
LEVELS = [1, 4, 8]
"""Requests at once."""
MAX_TOKENS = 48
"""Of an answer."""
MAX_NODES = 12
"""Where the checkpoint records no shape."""
PROMPTS = [
    "Explain in simple words why the sky is blue.",
    "Rewrite this message so that it is polite: "
    "Send me the report now. You are late again and I am tired of waiting.",
    "Write a Python function that returns the largest number in a list.",
    "A box holds 12 eggs. How many eggs are in 4 boxes? Show the calculation.",
    "Summarise this text in two sentences: The library in our town opened in 1911 in a former "
    "mill. For decades it lent books to the workers of the factories nearby. When the "
    "factories closed, fewer people came, and in 1985 the council wanted to sell the building. "
    "Readers collected four thousand signatures against the plan. Today it is open every day.",
    "What is the capital of France?",
]
WHY_NOT_IDENTICAL = (
    "In bfloat16 the two most probable tokens are sometimes equal up to rounding. A step that "
    "computes more tokens at once rounds differently, and may choose the other one. Plain vLLM "
    "does the same at another number of requests. In float32 this is rare."
)


def run_demo(
    cache_dir: Path,
    target: str | None = None,
    drafter: str | None = None,
    console: Console | None = None,
) -> None:
    """Run the whole demo; `cache_dir` keeps the target and the engines' logs.

    Raises:
        ConfigError: the target cannot be had, the drafter does not fit, or no engine works.
    """
    console = console or Console()
    disable_progress_bar()  # transformers has one for each file that it reads or writes
    folder = cache_dir.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if target is None:
        target = str(folder / NAME)
        get_target(folder / NAME, console)
    opened, speculation = pair_of(target, drafter)
    dtype = str(fast_dtype()).removeprefix("torch.")
    prompts = prompts_of(opened, PROMPTS)
    rounds = [each for level in LEVELS for each in _rounds(level, prompts)]
    plain, drafted = (
        _timed(folder, Job(os.path.expanduser(target), config, dtype, rounds), which, console)
        for which, config in (("without", None), ("with", speculation))
    )

    _print_comparison(console, dtype, plain, drafted)
    same = chain(*map(_same_answers, plain, drafted))
    if dtype != "float32" and not all(same):
        console.print(WHY_NOT_IDENTICAL)
    console.print(f"\nThe answers; [{DRAFTED}]this colour[/] was drafted and accepted")
    for question, steps in zip(PROMPTS, drafted[0].answers, strict=True):
        _print_answer(console, opened.tokenizer, question, steps)
    console.print(f"\nThe target and the engines' logs are in {folder}")


def pair_of(target: str, drafter: str | None) -> tuple[Target, dict[str, Any]]:
    """A target, and the speculative config of its drafter, or of the shipped one.

    Raises:
        ConfigError: the drafter does not fit.
    """
    checkpoint = Checkpoint.open(drafter or str(shipped_drafter(NAME)))
    opened = Target.open(target)
    misfits = misfits_of(checkpoint.head, opened.config)
    require_fit(f"the drafter {checkpoint.model!r}", target, misfits)
    speculation = {"num_speculative_tokens": MAX_NODES, **shape_of(checkpoint.values)}
    # A prompt is decoded several times: its answer must not come from the last time's.
    speculation |= {"model": os.path.expanduser(checkpoint.model), "earlier_answers": 0}
    return opened, speculation


def prompts_of(target: Target, questions: Sequence[str]) -> list[list[int]]:
    """Token ids: by the target's chat template, or as mere text where it has none.

    Raises:
        ConfigError: the target has no embedding of one of them.
    """
    embedded = EmbeddedTokens(target.tokenizer, target.vocab_size)
    renderer = PromptRenderer(target.tokenizer, embedded)
    return [renderer.prompt(Conversation((question,)), []) for question in questions]


def _rounds(level: int, prompts: list[list[int]]) -> list[Round]:
    """A warm-up, and what is timed: three prompts per request keep the batch full for longer."""
    batch = list(islice(cycle(prompts), max(len(prompts), 3 * level)))
    return [Round(batch, MAX_TOKENS // 2, level), Round(batch, MAX_TOKENS, level)]


def _timed(folder: Path, job: Job, which: str, console: Console) -> list[Decoded]:
    """What a job's engine decoded at each level, without the warm-ups."""
    with progress_bar(console) as progress:
        task = progress.add_task(f"vLLM {which} ReDrafter", total=len(job.rounds), status="rounds")
        decoded = []
        for each in decode_in_vllm(folder, job):
            decoded.append(each)
            progress.advance(task)
    return decoded[1::2]


def _same_answers(before: Decoded, after: Decoded) -> list[bool]:
    pairs = zip(before.answers, after.answers, strict=True)
    return [[*chain(*one)] == [*chain(*other)] for one, other in pairs]


def _print_comparison(
    console: Console,
    dtype: str,
    plain: Sequence[Decoded],
    drafted: Sequence[Decoded],
) -> None:
    table = Table(title=f"Greedy decoding in vLLM, {dtype}, tokens per second")
    for column in ("requests at once", "plain", "ReDrafter", "speed-up", "tokens per target step"):
        table.add_column(column, justify="right")
    table.add_column("outputs identical")
    for level, before, after in zip(LEVELS, plain, drafted, strict=True):
        rates = [len([*chain(*chain(*each.answers))]) / each.seconds for each in (before, after)]
        # The first step of an answer is its prompt's.
        sizes = [len(step) for answer in after.answers for step in answer[1:]]
        same = _same_answers(before, after)
        table.add_row(
            str(level),
            *(f"{rate:.0f}" for rate in rates),
            f"{rates[1] / rates[0]:.2f}×",
            f"{sum(sizes) / len(sizes):.2f}" if sizes else "–",
            "yes" if all(same) else f"no: {sum(same)} of {len(same)}",
        )
    console.print(table)


def _print_answer(
    console: Console, tokenizer: Any, question: str, steps: Sequence[Sequence[int]]
) -> None:
    """A question and its answer, whose accepted draft tokens are coloured."""
    text, done, shown = Text(), "", list[int]()
    for step in steps:
        for token, style in zip(step, [DRAFTED] * (len(step) - 1) + [""], strict=True):
            # Byte-level tokens may be parts of a character: decode all, and show what is new.
            shown.append(token)
            decoded = tokenizer.decode(shown, skip_special_tokens=True)
            text.append(decoded[len(done) :], style)  # a Text leaves control characters out
            done = decoded
    console.print(Text(f"\n> {question}", style="bold"))
    console.print(text)
    console.print(
        f"{len(shown) - len(steps)} of its {len(shown)} tokens were drafted, in {len(steps)} "
        "target steps",
        style="dim",
    )
