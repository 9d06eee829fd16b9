"""The story of the demo, in order: target, answers, drafter, comparison."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from vllm_redrafter.checkpoints import load_config, save_drafter
from vllm_redrafter.config import ConfigError, ReDrafterConfig
from vllm_redrafter.demo.answers import write_answers
from vllm_redrafter.demo.corpus import MODULES, excerpts, standard_library_sources
from vllm_redrafter.demo.decoding import DecodingRequest, LevelResult, decode
from vllm_redrafter.demo.report import print_answer, print_comparison
from vllm_redrafter.demo.target import TargetSettings, fast_dtype, make_target
from vllm_redrafter.training.data import TokenBlocks
from vllm_redrafter.training.target import load_target
from vllm_redrafter.training.trainer import (
    TrainingConfig,
    new_drafter,
    progress_bar,
    train_drafter,
)

TARGET = TargetSettings()
MAX_PROMPT_TOKENS = 80
MAX_ANSWER_TOKENS = 96
NUM_TRAINING_PROMPTS = 896
NUM_HELD_OUT_PROMPTS = 64
"""Prompts that the drafter does not train on; those that are measured come from these."""
ANSWER_BATCH = 128

DRAFTER_TRAINING = TrainingConfig(
    num_steps=360, batch_size=8, learning_rate=2e-3, unroll_steps=5, loss="kl"
)

SPECULATION = ReDrafterConfig(num_speculative_tokens=12, beam_width=3, beam_length=5)
NODES_BY_REQUESTS = [[1, 1, 12], [2, 4, 3], [5, 8, 2]]
"""vLLM's num_speculative_tokens_per_batch_size: the more requests share a step on a CPU, the more
a verified node costs."""

LEVELS = [1, 4, 8]
NUM_PROMPTS = 8


@dataclass(frozen=True)
class Workspace:
    """Where the demo's artifacts are, and what made them.

    A target's settings are part of its drafter's, so that a new target makes a new drafter.
    """

    folder: Path
    target: Path
    target_settings: dict[str, Any]

    def answers(self, name: str) -> Path:
        return self.folder / f"{name}-answers.safetensors"


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
    space = _workspace(cache_dir, target)
    if target is None:
        _make_target(space, console)
    if drafter is not None:
        _check_sizes(space.target, drafter)
    held_out = _answers(space, "held-out", console)
    if drafter is None:
        drafter = space.folder / "drafter"
        training = _answers(space, "training", console)
        _make_drafter(space, drafter, training, held_out, console)
    _compare(space, drafter, prompts_of(held_out[:NUM_PROMPTS]), console)
    console.print(f"{time.monotonic() - started:.0f} s in total; artifacts are in {space.folder}")


def _workspace(cache_dir: Path, target: Path | None) -> Workspace:
    cache_dir = cache_dir.expanduser().resolve()
    if target is None:
        settings = {**asdict(TARGET), "modules": list(MODULES)}
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
    wanted = AutoConfig.from_pretrained(target).get_text_config()
    for name in ("hidden_size", "vocab_size"):
        if getattr(found, name) != getattr(wanted, name):
            raise ConfigError(
                f"--drafter {str(drafter)!r} has {name} {getattr(found, name)}, the target "
                f"{str(target)!r} has {getattr(wanted, name)}: give the --target that it was "
                "trained for, or leave --drafter out to train one"
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


def _make_target(space: Workspace, console: Console) -> None:
    with _made_once(space.target, space.target_settings, console) as needed:
        if needed:
            make_target(space.target, standard_library_sources(), TARGET, console)


def _answers(
    space: Workspace, name: Literal["held-out", "training"], console: Console
) -> TokenBlocks:
    """How the target continues the held-out excerpts of its text, or some of the others."""
    wanted = NUM_HELD_OUT_PROMPTS if name == "held-out" else NUM_TRAINING_PROMPTS
    settings = {**space.target_settings, "prompts": wanted, "max_tokens": MAX_ANSWER_TOKENS}
    path = space.answers(name)
    with _made_once(path, settings, console) as needed:
        if needed:
            tokenizer = AutoTokenizer.from_pretrained(space.target)
            encoded = tokenizer(excerpts(standard_library_sources()))["input_ids"]
            short = [ids for ids in encoded if len(ids) <= MAX_PROMPT_TOKENS]
            held_out, others = short[:NUM_HELD_OUT_PROMPTS], short[NUM_HELD_OUT_PROMPTS:]
            prompts = (held_out if name == "held-out" else others)[:wanted]
            target, eos = load_target(space.target), tokenizer.eos_token_id
            answers = write_answers(target, prompts, eos, MAX_ANSWER_TOKENS, ANSWER_BATCH, console)
            TokenBlocks.from_answers(prompts, answers).save(path)
    return TokenBlocks.load(path)


def _make_drafter(
    space: Workspace, folder: Path, training: TokenBlocks, held_out: TokenBlocks, console: Console
) -> None:
    recipe = {**asdict(DRAFTER_TRAINING), "autocast": str(fast_dtype())}
    settings = {"target": space.target_settings, "training": recipe}
    with _made_once(folder, settings, console) as needed:
        if needed:
            target = load_target(space.target)
            drafter = new_drafter(target, exit_dim=target.config.get_text_config().hidden_size)
            config = replace(DRAFTER_TRAINING, autocast=fast_dtype())
            train_drafter(drafter, target, training, held_out, config, SPECULATION, console)
            save_drafter(drafter, folder, verifier=str(space.target), training=recipe)


def prompts_of(blocks: TokenBlocks) -> list[list[int]]:
    """The part of each block that the target did not write."""
    starts = blocks.generated.int().argmax(dim=1).tolist()
    return [tokens[:start].tolist() for tokens, start in zip(blocks.tokens, starts, strict=True)]


def _compare(space: Workspace, drafter: Path, prompts: list[list[int]], console: Console) -> None:
    """Decode the prompts without and with ReDrafter, and print what came of it."""
    speculation = {
        "model": str(drafter.expanduser().resolve()),
        **asdict(SPECULATION),
        "num_speculative_tokens_per_batch_size": NODES_BY_REQUESTS,
    }
    plain = _decode(space, "vLLM without ReDrafter", None, prompts, console)
    drafted = _decode(space, "vLLM with ReDrafter", speculation, prompts, console)
    print_comparison(console, plain, drafted)
    # One request at a time: each of its steps has the whole tree.
    answers = drafted[0].answers
    longest = max(range(len(prompts)), key=lambda i: sum(map(len, answers[i])))
    tokenizer = AutoTokenizer.from_pretrained(space.target)
    print_answer(console, tokenizer, prompts[longest], answers[longest])


def _decode(
    space: Workspace,
    title: str,
    speculation: dict[str, Any] | None,
    prompts: list[list[int]],
    console: Console,
) -> list[LevelResult]:
    request = DecodingRequest(
        target=str(space.target),
        speculative_config=speculation,
        prompts=prompts,
        max_tokens=MAX_ANSWER_TOKENS,
        levels=LEVELS,
        max_model_len=TARGET.max_length,
    )
    log = space.folder / f"{title.replace(' ', '-').lower()}.log"
    with progress_bar(console) as progress:
        task = progress.add_task(title, total=len(prompts) * len(LEVELS), status="starting")

        def show(finished: int) -> None:
            progress.update(task, completed=finished, status="answers")

        return decode(request, log, show)
