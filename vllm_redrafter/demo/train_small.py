"""The story of the demo, in order: target, answers, drafter, comparison."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from vllm_redrafter.checkpoints.fit import differences_from
from vllm_redrafter.checkpoints.reading import load_config
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.data.source import read_all, split
from vllm_redrafter.demo.corpus import MODULES, excerpts, standard_library_sources
from vllm_redrafter.demo.decoding import (
    PROMPTS_PER_REQUEST,
    DecodingJob,
    LevelResult,
    decode,
    engine_environment,
)
from vllm_redrafter.demo.report import print_answer, print_comparison
from vllm_redrafter.demo.target import TargetSettings, fast_dtype, make_target
from vllm_redrafter.errors import ConfigError
from vllm_redrafter.files import tail
from vllm_redrafter.progress import progress_bar
from vllm_redrafter.training.config import TrainingConfig
from vllm_redrafter.training.run import TrainingJob, train

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
    # The better of both at temperature 0 and near it (docs/training.md).
    loss="mix",
    precision="bf16" if fast_dtype() == torch.bfloat16 else "no",
    target_dtype="float32",
    held_out=NUM_HELD_OUT,
    evaluate_every=240,
)

SPECULATION = ReDrafterConfig(num_speculative_tokens=12, beam_width=3, beam_length=5)
LEVELS = [1, 4, 8]
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


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/vllm-redrafter/demo`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-redrafter" / "demo"


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
        _check_sizes(space.target, drafter)
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
    target = target.expanduser().resolve()
    if not (target / "config.json").is_file():
        raise ConfigError(
            f"--target {str(target)!r}: no config.json there; give the folder of a model in "
            "Hugging Face format, or leave --target out to train one"
        )
    # Another target's answers and drafter must not be taken for this one's.
    key = hashlib.sha256(str(target).encode()).hexdigest()[:8]
    return Workspace(cache_dir / f"target-{key}", target, {"target": str(target)})


def _check_sizes(target: Path, drafter: Path) -> None:
    found = load_config(str(drafter.expanduser()))
    for size in differences_from(found, AutoConfig.from_pretrained(target)):
        raise ConfigError(
            f"--drafter {str(drafter)!r} has {size.entry} {size.drafter}, the target "
            f"{str(target)!r} has {size.target}: give the --target that it was trained for, or "
            "leave --drafter out to train one"
        )


@contextmanager
def _made_once(path: Path, settings: dict[str, Any], console: Console) -> Iterator[bool]:
    """Whether `path` has still to be made; if so, it counts as made when the body is done.

    What made it is recorded beside it: with other settings it is made anew.
    """
    record = path.with_name(f"{path.name}.made-with.json")
    if path.exists() and record.is_file() and json.loads(record.read_text()) == settings:
        console.print(f"{path.name}: made by an earlier run")
        yield False
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    started = time.monotonic()
    yield True
    record.write_text(json.dumps(settings, indent=2) + "\n")
    console.print(f"{path.name}: made in {time.monotonic() - started:.0f} s")


def make_demo_target(space: Workspace, console: Console, training: TargetSettings = TARGET) -> None:
    """Train the demo's target, unless it is there."""
    with _made_once(space.target, space.target_settings, console) as needed:
        if needed:
            make_target(space.target, standard_library_sources(), training, console)


def make_data(space: Workspace, console: Console) -> None:
    """How the target continues excerpts of its text: `vllm-redrafter generate-data`."""
    settings = {
        **space.target_settings,
        "prompts": space.num_prompts,
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    with _made_once(space.data, settings, console) as needed:
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
    with _made_once(folder, settings, console) as needed:
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
    print_comparison(console, plain, drafted)
    # One request at a time: each of its steps has the whole tree.
    answers = drafted[0].answers
    longest = max(range(len(answers)), key=lambda i: sum(map(len, answers[i])))
    tokenizer = AutoTokenizer.from_pretrained(space.target)
    print_answer(console, tokenizer, prompts[longest], answers[longest])


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
    )
    log = space.folder / f"{title.replace(' ', '-').lower()}.log"
    with progress_bar(console) as progress:
        task = progress.add_task(title, total=job.decodings, status="starting")

        def show(finished: int) -> None:
            progress.update(task, completed=finished, status="answers")

        return decode(job, log, show)
