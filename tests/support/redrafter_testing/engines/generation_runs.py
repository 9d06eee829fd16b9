# SPDX-License-Identifier: Apache-2.0
"""Generation with an engine that is made up, into a folder: what tests of it share."""

import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from redrafter_testing.engines.fake_engine import FakeEngine, Killed
from redrafter_testing.models.tiny_models import make_worded_target
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.generation import GenerationSummary, generate_data
from vllm_redrafter.data.settings import GenerationSettings, SamplingSettings
from vllm_redrafter.data.target import Target

SETTINGS = GenerationSettings(sampling=SamplingSettings(max_tokens=40), shard_size=3, in_flight=4)


def prompts(count: int) -> list[Conversation]:
    """Conversations of one, two and three turns."""
    turns = [tuple(f"value {i} list {turn}" for turn in range(1 + i % 3)) for i in range(count)]
    return [Conversation(of_line, source=f"line {i}") for i, of_line in enumerate(turns)]


PROMPTS = prompts(11)


def make_folder(folder: Path, template: str | None) -> Path:
    return with_template(make_worded_target(folder), template)


def with_template(folder: Path, template: str | None) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def with_extra_token(folder: Path) -> Path:
    """Give the tokenizer `<|extra|>`, the first token that the model has no embedding of."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = AutoConfig.from_pretrained(folder).vocab_size
    tokenizer.add_tokens([f"<|{i}|>" for i in range(rows - len(tokenizer))] + ["<|extra|>"])
    tokenizer.save_pretrained(folder)
    return folder


def run(
    target: Path,
    output: Path,
    prompts: list[Conversation] = PROMPTS,
    settings: GenerationSettings = SETTINGS,
    console: Console | None = None,
    kind: type[FakeEngine] = FakeEngine,
    **engine: Any,
) -> tuple[GenerationSummary | None, FakeEngine]:
    """The summary (None where it died) and the engine."""
    given = {"settings": settings, "console": console, "kind": kind, **engine}
    summary, engines = ran(generate_data, str(target), prompts, output, **given)
    assert all(started.closed for started in engines)
    return summary, engines[0] if engines else FakeEngine(None, settings)


def ran(
    command: Callable[..., Any],
    *asked: Any,
    settings: Any,
    console: Console | None = None,
    kind: type[FakeEngine] = FakeEngine,
    **engine: Any,
) -> tuple[Any, list[FakeEngine]]:
    """What a command returns (None where it died), and the engines that it started."""
    engines: list[FakeEngine] = []

    def start(target: Target, settings: GenerationSettings) -> FakeEngine:
        engines.append(kind(target.tokenizer, settings, **engine))
        return engines[0]

    with suppress(Killed):
        console = console or Console(file=io.StringIO())
        return command(*asked, start, settings, console), engines
    return None, engines


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
