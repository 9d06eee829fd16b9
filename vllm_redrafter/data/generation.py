"""Training data from the target itself: it answers prompts, and the answers go into shards.

A shard is written when all its conversations are finished. A run that is stopped therefore loses
at most the shards that it was working on, and the next run writes those that are missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from vllm_redrafter.data.dataset import (
    INFO_FILE,
    DatasetInfo,
    Row,
    exclusive,
    finished_shards,
    write_shard,
)
from vllm_redrafter.data.fingerprint import digest, target_fingerprint, tokenizer_fingerprint
from vllm_redrafter.data.prompts import Conversation
from vllm_redrafter.data.settings import GenerationSettings
from vllm_redrafter.data.target_files import load_from
from vllm_redrafter.data.turns import Dialogue, OpenTurn, PromptRenderer, TargetEngine
from vllm_redrafter.errors import ConfigError
from vllm_redrafter.progress import progress_bar


@dataclass
class GenerationSummary:
    """What one run did; shards that were there before are not counted.

    Attributes:
        conversations: finished ones, the skipped ones among them.
        rows: of data.
        answers: what the target wrote.
        tokens: all tokens of these answers.
        cut_answers: those that reached `max_tokens`.
        truncated: conversations that lost turns or tokens, because `max_model_len` was reached.
        skipped: conversations whose first prompt is too long already: they have no row.
        kept_shards: found finished.
        seconds: from the first prompt to the last shard; the start of the engine is not counted.
        tokens_per_step: per request and step of the target; None without a drafter.
    """

    conversations: int = 0
    rows: int = 0
    answers: int = 0
    tokens: int = 0
    cut_answers: int = 0
    truncated: int = 0
    skipped: int = 0
    kept_shards: int = 0
    seconds: float = 0.0
    tokens_per_step: float | None = None

    @property
    def mean_answer_length(self) -> float:
        return self.tokens / self.answers if self.answers else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, dialogue: Dialogue) -> None:
        """Count a finished conversation; its answers have been counted one by one."""
        rows = dialogue.rows()
        self.conversations += 1
        self.rows += len(rows)
        self.cut_answers += dialogue.cut_answers
        self.skipped += not rows
        self.truncated += dialogue.truncated and bool(rows)

    def __str__(self) -> str:
        lines = [
            f"{self.rows} rows from {self.conversations} conversations: {self.answers} answers, "
            f"{self.tokens} tokens, {self.mean_answer_length:.1f} per answer "
            f"({self.cut_answers} answers were cut at max-tokens)",
            f"{self.truncated} conversations were truncated and {self.skipped} skipped, being "
            "longer than the model allows",
            f"{self.seconds:.0f} s, {self.tokens_per_second:.0f} tokens per second",
        ]
        if self.kept_shards:
            lines.insert(0, f"{self.kept_shards} shards were there already; this run's part:")
        if self.tokens_per_step is not None:
            lines.append(f"{self.tokens_per_step:.2f} tokens per target step")
        return "\n".join(lines)


def generate_data(
    target: str,
    prompts: Sequence[Conversation],
    output: Path,
    start_engine: Callable[[str, GenerationSettings], TargetEngine],
    settings: GenerationSettings | None = None,
    console: Console | None = None,
) -> GenerationSummary:
    """Let the target answer the prompts, and write the answers as training data.

    An output folder that holds a part of the very same data is completed. The same settings give
    the same data, in one run or in several (in exact arithmetic: an engine rounds differently in
    batches of other sizes, which may change a sampled token now and then).

    Args:
        target: a folder, or a hub id.
        prompts: what to answer.
        output: a folder of the format of `dataset.py`.
        start_engine: starts what lets the target answer, such as `OfflineEngine` with vLLM.
        settings: how; None for the defaults.
        console: where progress is shown.

    Raises:
        ConfigError: a setting, prompt, target or folder that cannot work; the disk is full; the
            folder holds data of other settings, which are named.
    """
    settings, console = settings or GenerationSettings(), console or Console()
    tokenizer = load_from(AutoTokenizer, target)
    renderer = PromptRenderer(tokenizer, settings.system_prompt)
    for conversation in prompts:
        renderer.check(conversation)
    info = _describe(target, tokenizer, prompts, settings)
    summary = GenerationSummary()
    with exclusive(output):
        missing = _missing_shards(output, info)
        summary.kept_shards = info.num_shards - len(missing)
        if not missing:
            console.print(f"{output} is complete: {info.num_shards} shards", markup=False)
            return summary
        console.print(f"starting the engine with {target}", markup=False)
        with closing(start_engine(target, settings)) as engine:
            job = _Generation(engine, info, prompts, renderer, output, missing, summary)
            try:
                job.run(settings.in_flight, console)
            finally:
                done = len(finished_shards(output))
                rest = "; the same command continues" if done < info.num_shards else ""
                finished = f"{done} of {info.num_shards} shards are finished in {output}{rest}"
                console.print(finished, markup=False)
            summary.tokens_per_step = engine.tokens_per_step()
    return summary


def _describe(
    target: str, tokenizer: Any, prompts: Sequence[Conversation], settings: GenerationSettings
) -> DatasetInfo:
    """What is to be written into dataset.json."""
    if not prompts:
        raise ConfigError("there are no prompts to answer")
    vocab_size = load_from(AutoConfig, target).get_text_config().vocab_size
    if settings.top_logprobs > vocab_size:
        raise ConfigError(
            f"--top-logprobs {settings.top_logprobs}: the target's vocabulary has {vocab_size}"
        )
    template = tokenizer.chat_template
    return DatasetInfo(
        target=target,
        target_fingerprint=target_fingerprint(target),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_fingerprint=digest(template) if template else None,
        prompts_fingerprint=digest([[c.system, *c.turns] for c in prompts]),
        num_conversations=len(prompts),
        shard_size=settings.shard_size,
        vocab_size=vocab_size,
        top_logprobs=settings.top_logprobs,
        system_prompt=settings.system_prompt,
        sampling=settings.sampling,
    )


def _missing_shards(output: Path, info: DatasetInfo) -> list[int]:
    """The shards to write, after a look at what is there.

    Raises:
        ConfigError: the folder holds other data.
    """
    finished = set(finished_shards(output))
    if (output / INFO_FILE).exists():
        found = DatasetInfo.load(output)
        if differences := found.differences(info):
            raise ConfigError(
                f"--output {output} holds data of other settings, which cannot be continued with "
                f"these: {'; '.join(differences)}. Give the former settings or another folder, or "
                "delete this one"
            )
    elif finished:
        raise ConfigError(
            f"--output {output} holds shards without a {INFO_FILE}: nobody knows what they are; "
            "give another folder, or delete this one"
        )
    else:
        info.save(output)
    return [shard for shard in range(info.num_shards) if shard not in finished]


class _Generation:
    """Conversations on their way from the prompts through the engine into shards."""

    def __init__(
        self,
        engine: TargetEngine,
        info: DatasetInfo,
        prompts: Sequence[Conversation],
        renderer: PromptRenderer,
        output: Path,
        missing: Sequence[int],
        summary: GenerationSummary,
    ) -> None:
        self._engine = engine
        self._info = info
        self._output = output
        self._summary = summary
        self._waiting: deque[OpenTurn] = deque()
        self._running: dict[int, Dialogue] = {}
        # A shard's finished conversations; it is gone from here when it is written.
        self._shards: dict[int, dict[int, list[Row]]] = {shard: {} for shard in missing}
        self._new: Iterator[Dialogue] = (
            Dialogue(index, prompts[index], renderer, info.sampling, engine.max_model_len)
            for shard in missing
            for index in info.conversations_of(shard)
        )

    def run(self, in_flight: int, console: Console) -> None:
        """Write all missing shards, `in_flight` conversations at a time."""
        started = time.monotonic()
        total = sum(len(self._info.conversations_of(shard)) for shard in self._shards)
        with progress_bar(console) as progress:
            before = self._info.num_conversations - total
            task = progress.add_task(
                "conversations", total=before + total, completed=before, status=""
            )
            self._admit(in_flight)
            for answer in self._engine.answers(self._waiting):
                self._summary.answers += 1
                self._summary.tokens += len(answer.tokens)
                self._summary.seconds = time.monotonic() - started
                dialogue = self._running.pop(answer.conversation)
                dialogue.take(answer)
                self._go_on(dialogue)
                self._admit(in_flight)
                status = f"{self._summary.tokens_per_second:.0f} tokens/s"
                completed = before + self._summary.conversations
                progress.update(task, completed=completed, status=status)
            progress.update(task, completed=before + self._summary.conversations)
        self._summary.seconds = time.monotonic() - started

    def _admit(self, in_flight: int) -> None:
        """Start new conversations where there is room for them."""
        while len(self._running) < in_flight:
            dialogue = next(self._new, None)
            if dialogue is None:
                return
            self._go_on(dialogue)

    def _go_on(self, dialogue: Dialogue) -> None:
        """Have the next turn answered; where there is none, put the conversation away."""
        turn = dialogue.next_turn()
        if turn is not None:
            self._waiting.append(turn)
            self._running[dialogue.index] = dialogue
            return
        self._summary.add(dialogue)
        shard = dialogue.index // self._info.shard_size
        finished = self._shards[shard]
        finished[dialogue.index] = dialogue.rows()
        if len(finished) == len(self._info.conversations_of(shard)):
            # Conversations end in any order; data has that of the prompts.
            rows = [row for index in sorted(finished) for row in finished[index]]
            write_shard(self._output, shard, rows, self._info.top_logprobs)
            del self._shards[shard]
