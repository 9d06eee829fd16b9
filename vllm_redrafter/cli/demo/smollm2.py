# SPDX-License-Identifier: Apache-2.0
"""The demo, in order: SmolLM2-135M-Instruct, two engines, what they answer and how fast."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint, shape_of
from vllm_redrafter.checkpoints.shipped import shipped_drafter
from vllm_redrafter.cli.chat.conversation import marked
from vllm_redrafter.cli.demo.comparison import CANDIDATES, NEAR, Parting, parting, verdict
from vllm_redrafter.cli.demo.engine import Decoded, Job, Round, decode_in_vllm
from vllm_redrafter.cli.demo.smollm2_target import get_target
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.target import EmbeddedTokens, Target
from vllm_redrafter.data.turns import PromptRenderer
from vllm_redrafter.engine.vllm_interface import ISSUES
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.processor import fast_dtype
from vllm_redrafter.utils.progress import progress_bar

NAME = "smollm2-135m-instruct"
"""Of the target's folder in the cache, and of its drafter in the package."""
LEVELS = [1, 4, 8]
"""Requests at once."""
MAX_TOKENS = 64
"""Of an answer."""
MAX_NODES = 12
"""Where the checkpoint records no shape."""
PROMPTS = [
    "What is photosynthesis? Answer in one sentence.",
    "Give me three tips for sleeping better.",
    "Summarize this text: The library in our town opened in 1911 in a former mill. For decades it "
    "lent books to the workers of the factories nearby. When the factories closed, fewer people "
    "came, and in 1985 the council wanted to sell the building. Readers collected four thousand "
    "signatures against the plan. Today it is open every day.",
    "Write a Python function that checks whether a number is prime.",
]
WHY_NEAR_TIES = (
    "At a near-tie the two tokens are at most {near} apart by plain vLLM's own log-probabilities, "
    "which is within {dtype}'s rounding. A step that computes more tokens at once rounds "
    "differently, and may choose the other one. So does plain vLLM at another number of requests."
)
FAULT = (
    "an answer is not plain vLLM's, and no near-tie explains it. Unless the target's largest "
    f"logits exceed 32, that is a fault of ReDrafter: please report what is printed above: {ISSUES}"
)


def run_demo(
    cache_dir: Path,
    target: str | None = None,
    drafter: str | None = None,
    console: Console | None = None,
) -> None:
    """Run the whole demo; `cache_dir` keeps the target and the engines' logs.

    Raises:
        ConfigError: the target cannot be had, the drafter does not fit, no engine works, or an
            answer parts from plain vLLM's where there is no near-tie.
    """
    console = console or Console()
    folder = cache_dir.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if target is None:
        target = str(folder / NAME)
        get_target(folder / NAME, console)
    opened, speculation = pair_of(target, drafter)
    dtype = str(fast_dtype()).removeprefix("torch.")
    prompts = prompts_of(opened, PROMPTS)
    rounds = [each for level in LEVELS for each in _rounds(level, prompts)]
    job, near = Job(os.path.expanduser(target), None, dtype, rounds), NEAR[dtype]
    plain = _decoded(folder, job, "without ReDrafter", console)[1::2]
    with_drafts = replace(job, speculative_config=speculation)
    drafted = _decoded(folder, with_drafts, "with ReDrafter", console)[1::2]
    partings = [
        [*map(parting, batch.prompts, map(_tokens, before.answers), map(_tokens, after.answers))]
        for batch, before, after in zip(rounds[1::2], plain, drafted, strict=True)
    ]
    if points := [each.prompt for each in chain(*partings) if each is not None]:
        asked = replace(job, rounds=[Round(points, 1, LEVELS[-1], CANDIDATES)])
        [decoded] = _decoded(folder, asked, "without ReDrafter, where answers part", console)
        told = iter(decoded.candidates)
        for of_level in partings:
            of_level[:] = [each and replace(each, candidates=next(told)) for each in of_level]

    _print_comparison(console, dtype, plain, drafted)
    console.print("Answers, beside plain vLLM's:")
    for level, of_level in zip(LEVELS, partings, strict=True):
        console.print(f"{level:2} at once: {verdict(of_level, near)}", highlight=False)
    if any(each.apart <= near for each in chain(*partings) if each):
        console.print(WHY_NEAR_TIES.format(dtype=dtype, near=near))
    legend = marked("tokens like these", console)
    console.print(Text.assemble("\nThe answers; ", legend, " were drafted and accepted"))
    for question, steps, each in zip(PROMPTS, drafted[0].answers, partings[0], strict=True):
        _print_answer(console, opened.tokenizer, question, steps, each)
    console.print(f"\nThe target and the engines' logs are in {folder}")
    if any(each.apart > near for each in chain(*partings) if each is not None):
        raise ConfigError(FAULT)


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


def _decoded(folder: Path, job: Job, which: str, console: Console) -> list[Decoded]:
    """What a job's engine decoded, round by round."""
    with progress_bar(console) as progress:
        task = progress.add_task(f"vLLM {which}", total=len(job.rounds), status="rounds")
        progress.update(task)  # the line that a file gets at once
        decoded = []
        for each in decode_in_vllm(folder, job):
            decoded.append(each)
            progress.update(task, advance=1)
    return decoded


def _tokens(steps: Sequence[Sequence[int]]) -> list[int]:
    return [*chain(*steps)]


def _print_comparison(
    console: Console,
    dtype: str,
    plain: Sequence[Decoded],
    drafted: Sequence[Decoded],
) -> None:
    table = Table(title=f"Greedy decoding in vLLM, {dtype}, tokens per second")
    for column in ("requests at once", "plain", "ReDrafter", "speed-up", "tokens per target step"):
        table.add_column(column, justify="right")
    for level, before, after in zip(LEVELS, plain, drafted, strict=True):
        rates = [sum(map(len, chain(*each.answers))) / each.seconds for each in (before, after)]
        # The first step of an answer is its prompt's.
        sizes = [len(step) for answer in after.answers for step in answer[1:]]
        table.add_row(
            str(level),
            *(f"{rate:.0f}" for rate in rates),
            f"{rates[1] / rates[0]:.2f}×",
            f"{sum(sizes) / len(sizes):.2f}" if sizes else "–",
        )
    console.print(table)


def _print_answer(
    console: Console,
    tokenizer: Any,
    question: str,
    steps: Sequence[Sequence[int]],
    where: Parting | None,
) -> None:
    """A question and its answer, whose accepted draft tokens are marked."""
    text, done, shown = Text(), "", list[int]()
    for step in steps:
        for tokens, is_drafted in ((step[:-1], True), (step[-1:], False)):
            # Byte-level tokens may be parts of a character: decode all, and show what is new.
            shown += tokens
            decoded = tokenizer.decode(shown, skip_special_tokens=True)
            new = decoded[len(done) :]  # a Text leaves control characters out
            text.append(marked(new, console) if is_drafted else Text(new))
            done = decoded
    console.print(Text(f"\n> {question}", style="bold"))
    console.print(text, "…" if len(shown) == MAX_TOKENS else "")
    said = f"{len(shown) - len(steps)} of its {len(shown)} tokens were drafted, in {len(steps)} "
    said += (
        f"target steps; {f'parts from plain vLLM at {where}' if where else 'equal to plain vLLM'}"
    )
    console.print(said, style="dim")
