"""`--train-small`: a small target and its drafter, both trained here, then the comparison.

No network, no GPU, a few minutes on two cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from vllm_redrafter.cli.demo.cache import made_once
from vllm_redrafter.cli.demo.corpus import MODULES, excerpts, standard_library_sources
from vllm_redrafter.cli.demo.decoding import PROMPTS_PER_REQUEST, DecodingJob, LevelResult, decode
from vllm_redrafter.cli.demo.engine_process import engine_environment
from vllm_redrafter.cli.demo.given import check_sizes, target_folder
from vllm_redrafter.cli.demo.report import (
    ShownAnswer,
    print_answer,
    print_comparison,
    print_repetition,
)
from vllm_redrafter.cli.demo.target import TargetSettings, make_target
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.data.source import read_all, split
from vllm_redrafter.training.run import TrainingJob, train
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import tail
from vllm_redrafter.utils.processor import fast_dtype
from vllm_redrafter.utils.progress import progress_bar

TARGET = TargetSettings()
MAX_PROMPT_TOKENS = 80
MAX_ANSWER_TOKENS = 96
NUM_DATA_PROMPTS = 640
NUM_HELD_OUT = 64
"""Conversations that the drafter does not train on; the prompts that are measured are theirs."""

DRAFTER_TRAINING = TrainingConfig(
    max_steps=240,
    batch_size=8,
    micro_batch_size=8,
    block_length=MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS,
    learning_rate=2e-3,
    warmup_steps=20,
    unroll_steps=5,
    head="gated",
    # The better of both at temperature 0 and near it (docs/training.md).
    loss="mix",
    precision="bf16" if fast_dtype() == torch.bfloat16 else "no",
    target_dtype="float32",
    held_out=NUM_HELD_OUT,
    evaluate_every=240,
)

SPECULATION = ReDrafterConfig(num_speculative_tokens=12, beam_width=3, beam_length=5)
LEVELS = [1, 4, 8]
DTYPE = "float32"
NUM_PROMPTS = max(LEVELS) * PROMPTS_PER_REQUEST


@dataclass(frozen=True)
class Workspace:
    """Where the demo's artifacts are, and what made them.

    A target's settings are part of its drafter's, so that a new target makes a new drafter.
    """

    folder: Path
    target: Path
    target_settings: dict[str, Any]
    num_prompts: int = NUM_DATA_PROMPTS

    @property
    def data(self) -> Path:
        return self.folder / "data"


def run_demo(
    cache_dir: Path,
    target: Path | None = None,
    drafter: Path | None = None,
    console: Console | None = None,
) -> None:
    """Run the whole demo.

    Args:
        cache_dir: where artifacts are kept and looked for.
        target: a target to use instead of training one.
        drafter: a drafter to use instead of training one.
        console: where to print.

    Raises:
        ConfigError: a folder is not what it should be, or vLLM failed.
    """
    console = console or Console()
    started = time.monotonic()
    # Bars of its own for every file it reads or writes.
    disable_progress_bar()
    space = workspace(cache_dir, target)
    if target is None:
        make_demo_target(space, console)
    if drafter is not None:
        remedy = "give the --target that it was trained for, or leave --drafter out to train one"
        check_sizes(space.target, drafter, f"--drafter {str(drafter)!r}", remedy)
    make_data(space, console)
    if drafter is None:
        drafter = space.folder / "drafter"
        _make_drafter(space, drafter, console)
    _compare(space, drafter, held_out_prompts(space, NUM_PROMPTS), console)
    console.print(f"{time.monotonic() - started:.0f} s in total; artifacts are in {space.folder}")


def workspace(
    cache_dir: Path, target: Path | None = None, training: TargetSettings = TARGET
) -> Workspace:
    """Where artifacts of the demo's own target, or of another one, are.

    Raises:
        ConfigError: `target` is no model's folder.
    """
    cache_dir = cache_dir.expanduser().resolve()
    if target is None:
        settings = {**asdict(training), "modules": list(MODULES)}
        # The text is this Python's own.
        settings["python"] = platform.python_version()
        settings["dtype"] = str(fast_dtype())
        return Workspace(cache_dir, cache_dir / "target", settings)
    target = target_folder(target, "to train one")
    # Another target's answers and drafter must not be taken for this one's.
    key = hashlib.sha256(str(target).encode()).hexdigest()[:8]
    return Workspace(cache_dir / f"target-{key}", target, {"target": str(target)})


def make_demo_target(space: Workspace, console: Console, training: TargetSettings = TARGET) -> None:
    """Train the demo's target, unless it is there."""
    with made_once(space.target, space.target_settings, console) as needed:
        if needed:
            make_target(space.target, standard_library_sources(), training, console)


def make_data(space: Workspace, console: Console) -> None:
    """How the target continues excerpts of its text: `vllm-redrafter generate-data`."""
    settings = {
        **space.target_settings,
        "prompts": space.num_prompts,
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    with made_once(space.data, settings, console) as needed:
        if needed:
            prompts = space.folder / "prompts.jsonl"
            lines = (json.dumps({"prompt": text}) for text in _excerpts(space))
            prompts.write_text("\n".join(lines) + "\n")
            _run_command(
                console,
                space.folder / "generate-data.log",
                "generate-data",
                *(str(space.target), "--prompts", str(prompts), "--output", str(space.data)),
                *("--temperature", "0", "--max-tokens", str(MAX_ANSWER_TOKENS)),
                *("--in-flight", "128", "--dtype", "float32", "--enforce-eager"),
            )


def _excerpts(space: Workspace) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(space.target)
    texts = excerpts(standard_library_sources())
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    short = [t for t, n in zip(texts, lengths, strict=True) if n <= MAX_PROMPT_TOKENS]
    return short[: space.num_prompts]


def _run_command(console: Console, log: Path, *arguments: str) -> None:
    """Run one of our own commands in a process of its own, where vLLM finds all memory free."""
    console.print(f"$ vllm-redrafter {shlex.join(arguments)}", style="dim", soft_wrap=True)
    command = [sys.executable, "-m", "vllm_redrafter", *arguments]
    # vLLM's warnings would run through the progress bar.
    with log.open("w") as errors:
        environment = engine_environment(os.environ)
        done = subprocess.run(command, env=environment, stderr=errors, check=False)
    if done.returncode:
        raise ConfigError(f"{arguments[0]} failed; the end of {log}:\n{tail(log)}")


def _make_drafter(space: Workspace, folder: Path, console: Console) -> None:
    """`vllm-redrafter train`."""
    recipe = asdict(DRAFTER_TRAINING)
    settings = {"target": space.target_settings, "training": recipe}
    with made_once(folder, settings, console) as needed:
        if needed:
            job = TrainingJob(
                str(space.target), (space.data,), folder, DRAFTER_TRAINING, SPECULATION
            )
            train(job, console)


def held_out_prompts(space: Workspace, num: int) -> list[list[int]]:
    """The first prompts of those that the drafter was not trained on."""
    written = read_all((space.data,), str(space.target))
    config = DRAFTER_TRAINING
    rows = split(written, config.held_out, config.seed, config.block_length).held_out
    return prompts_of(rows, num)


def prompts_of(rows: TextRows, num: int) -> list[list[int]]:
    """What the target did not write, of the first rows."""
    prompts = []
    for index in range(min(num, len(rows))):
        row = rows[index]
        prompts.append(row.tokens[: int(row.generated.int().argmax())].tolist())
    return prompts


def _compare(space: Workspace, drafter: Path, prompts: list[list[int]], console: Console) -> None:
    """Decode the prompts without and with ReDrafter, and print what came of it."""
    speculation = {"model": str(drafter.expanduser().resolve()), **asdict(SPECULATION)}
    plain = _decode(space, "vLLM without ReDrafter", None, prompts, console)
    drafted = _decode(space, "vLLM with ReDrafter", speculation, prompts, console)
    print_comparison(console, plain, drafted, DTYPE)
    print_repetition(console, plain[-1].answers)
    # One request at a time: each of its steps has the whole tree.
    answers = drafted[0].answers
    longest = max(range(len(answers)), key=lambda i: sum(map(len, answers[i])))
    tokenizer = AutoTokenizer.from_pretrained(space.target)
    shown = ShownAnswer.of(prompts[longest], answers[longest], SPECULATION.context_matches)
    print_answer(console, tokenizer, shown, SPECULATION.context_matches)


def _decode(
    space: Workspace,
    title: str,
    speculation: dict[str, Any] | None,
    prompts: list[list[int]],
    console: Console,
) -> list[LevelResult]:
    job = DecodingJob(
        target=str(space.target),
        speculative_config=speculation,
        prompts=prompts,
        max_tokens=MAX_ANSWER_TOKENS,
        levels=LEVELS,
        max_model_len=TARGET.max_length,
        dtype=DTYPE,
    )
    log = space.folder / f"{title.replace(' ', '-').lower()}.log"
    with progress_bar(console) as progress:
        task = progress.add_task(title, total=job.decodings, status="starting")

        def show(finished: int) -> None:
            progress.update(task, completed=finished, status="answers")

        return decode(job, log, show)
