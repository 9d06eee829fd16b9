# SPDX-License-Identifier: Apache-2.0
"""The demo, in order: SmolLM2-135M-Instruct, two engines, what they say and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.checkpoints.shipped import shipped_drafter
from vllm_redrafter.cli.demo.decoding import (
    DecodingJob,
    Engine,
    LevelResult,
    decode_in_turns,
    engines,
)
from vllm_redrafter.cli.demo.engine_worker import Round
from vllm_redrafter.cli.demo.given import check_sizes, target_folder
from vllm_redrafter.cli.demo.prompts import PROMPTS
from vllm_redrafter.cli.demo.report import (
    WHY_NOT_IDENTICAL,
    ShownAnswer,
    all_identical,
    print_answers,
    print_comparison,
)
from vllm_redrafter.cli.demo.smollm2_target import get_target
from vllm_redrafter.cli.serving_backend import Backend, serving_backend
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import PromptRenderer
from vllm_redrafter.data.vocabulary import EmbeddedTokens
from vllm_redrafter.utils.processor import fast_dtype
from vllm_redrafter.utils.progress import progress_bar

NAME = "smollm2-135m-instruct"
"""Of the target's folder in the cache, and of its drafter in the package."""
LEVELS = [1, 4, 8]
TIMED_TOKENS = 32
"""Of each answer. Four rounds in two engines at all levels have to fit into a minute and a half."""
SHOWN_TOKENS = 64
MAX_MODEL_LEN = 512
UNRECORDED = ReDrafterConfig(num_speculative_tokens=12, beam_width=4, beam_length=4)
"""How to speculate with a drafter whose checkpoint does not say."""


@dataclass(frozen=True)
class Outcome:
    """What came of the comparison.

    Attributes:
        plain: per level, without ReDrafter.
        drafted: per level, with it.
        answers: whole ones, to one request at a time, when each step has the whole tree: per
            prompt and engine step, the step's tokens.
    """

    plain: list[LevelResult]
    drafted: list[LevelResult]
    answers: list[list[list[int]]]


@dataclass(frozen=True)
class Way:
    """What decodes.

    Attributes:
        name: in what is printed.
        dtype: of the target.
        levels: requests at once.
        engines: starts an engine for each of some jobs, given places for their logs.
    """

    name: str
    dtype: str
    levels: list[int]
    engines: Callable[
        [Sequence[DecodingJob], Sequence[Path]], AbstractContextManager[Sequence[Engine]]
    ]


def _way_of(backend: Backend) -> Way:
    if backend == "vllm":
        return Way("vLLM", str(fast_dtype()).removeprefix("torch."), LEVELS, engines)
    from vllm_redrafter.cli.demo.mlx_engine import MLXEngine, usual_dtype

    def in_this_process(
        jobs: Sequence[DecodingJob], _: Sequence[Path]
    ) -> AbstractContextManager[Sequence[Engine]]:
        return nullcontext([MLXEngine(job) for job in jobs])

    return Way("mlx-lm", usual_dtype(), [1], in_this_process)


def run_demo(
    cache_dir: Path,
    target: Path | None = None,
    drafter: Path | None = None,
    console: Console | None = None,
    backend: Backend | None = None,
) -> None:
    """Run the whole demo.

    Args:
        cache_dir: where the target is kept and looked for; logs are there, too.
        target: a target to use instead of SmolLM2.
        drafter: a drafter to use instead of SmolLM2's, which comes with the package.
        console: where to print.
        backend: what decodes; None for what is installed.

    Raises:
        ConfigError: the target is not to be had; a folder is not what it should be; nothing that
            decodes is installed, or it failed.
    """
    way = _way_of(backend or serving_backend())
    console = console or Console()
    # Bars of its own for every file it reads or writes.
    disable_progress_bar()
    folder = cache_dir.expanduser().resolve()
    if target is None:
        target = folder / NAME
        get_target(target, console)
    else:
        target = target_folder(target, NAME)
    drafter = _fitting_drafter(target, drafter)
    folder.mkdir(parents=True, exist_ok=True)

    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(target)
    questions = list(PROMPTS.values())
    jobs = _jobs(way, target, drafter, prompts_of(tokenizer, target, questions))
    outcome = _decode(way, jobs, folder, console)
    print_comparison(console, outcome.plain, outcome.drafted, way.dtype, way.name)
    console.print(_what_was_decoded(jobs[0]))
    if way.dtype != "float32" and not all_identical(outcome.plain, outcome.drafted):
        console.print(WHY_NOT_IDENTICAL)
    context_matches = (jobs[1].speculative_config or {})["context_matches"]
    shown = [
        ShownAnswer.of(prompt, steps, context_matches)
        for prompt, steps in zip(jobs[1].prompts, outcome.answers, strict=True)
    ]
    print_answers(console, tokenizer, questions, shown, context_matches)
    console.print()
    console.print(
        f"{time.monotonic() - started:.0f} s, without getting the target; it and engines' logs "
        f"are in {folder}"
    )


def _fitting_drafter(target: Path, drafter: Path | None) -> Path:
    """The drafter to use, absolute."""
    if drafter is None:
        drafter = shipped_drafter(NAME)
        name = f"the drafter {NAME!r}, which comes with this package,"
        remedy = "give a --drafter for that target, or leave --target out"
    else:
        name = f"--drafter {str(drafter)!r}"
        remedy = (
            "give the --target that it was trained for, or leave --drafter out for that of "
            f"{NAME}, which comes with this package"
        )
    check_sizes(target, drafter, name, remedy)
    return drafter.expanduser().resolve()


def prompts_of(tokenizer: Any, target: Path, questions: Sequence[str]) -> list[list[int]]:
    """Token ids: by the target's chat template, or as mere text where it has none.

    Raises:
        ConfigError: the target has no embedding of one of them.
    """
    renderer = PromptRenderer(tokenizer, EmbeddedTokens(tokenizer, Target.open(target).vocab_size))
    return [renderer.prompt(Conversation((question,)), []) for question in questions]


def _jobs(way: Way, target: Path, drafter: Path, prompts: list[list[int]]) -> list[DecodingJob]:
    """Plain decoding, and ReDrafter's as the drafter's checkpoint asks for it."""
    recorded = Checkpoint.open(str(drafter)).shape
    speculation = {**asdict(UNRECORDED), **recorded, "model": str(drafter)}
    return [
        DecodingJob(
            str(target),
            speculative_config,
            prompts,
            TIMED_TOKENS,
            way.levels,
            MAX_MODEL_LEN,
            dtype=way.dtype,
        )
        for speculative_config in (None, speculation)
    ]


def _what_was_decoded(job: DecodingJob) -> str:
    """How many answers there are at each level."""
    answers = ", ".join(f"{len(job.prompts_at(level))}" for level in job.levels)
    levels = ", ".join(map(str, job.levels))
    return (
        f"{len(job.prompts)} prompts; {answers} answers at {levels} requests at once, so that no "
        f"batch runs empty early; the first {job.max_tokens} tokens of each answer."
    )


def _decode(way: Way, jobs: Sequence[DecodingJob], folder: Path, console: Console) -> Outcome:
    """Both engines in turns; then the one with ReDrafter alone, for the answers that are shown."""
    titles = [f"{way.name} {which} ReDrafter" for which in ("without", "with")]
    logs = [folder / f"{title.replace(' ', '-').lower()}.log" for title in titles]
    shown = Round(jobs[1].prompts, SHOWN_TOKENS, in_flight=1)
    with progress_bar(console) as progress:
        tasks = [
            progress.add_task(title, total=job.decodings, status="starting")
            for title, job in zip(titles, jobs, strict=True)
        ]
        progress.update(tasks[1], total=jobs[1].decodings + len(shown.prompts))

        def show(number: int, finished: int) -> None:
            progress.update(tasks[number], completed=finished, status="answers")

        with way.engines(jobs, logs) as started:
            plain, drafted = decode_in_turns(started, jobs, show)
            decoded = started[1].decode(shown, lambda: progress.advance(tasks[1]))
    return Outcome(plain, drafted, decoded.answers)
