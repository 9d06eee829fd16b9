"""Training data from the target itself: it answers prompts, and the answers go into shards.

A shard is written when all its conversations are finished. A run that is stopped therefore loses
at most the shards that it was working on, and the next run writes those that are missing; so do
other clients that write to the same folder at the same time.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.dataset import (
    INFO_FILE,
    DatasetInfo,
    finished_shards,
    remove_leftovers,
    write_shard,
)
from vllm_redrafter.data.dataset_row import Row
from vllm_redrafter.data.fingerprint import digest, target_fingerprint, tokenizer_fingerprint
from vllm_redrafter.data.generation_settings import GenerationSettings
from vllm_redrafter.data.leases import ShardLeases
from vllm_redrafter.data.left_out import LeftOut, UnusableRow
from vllm_redrafter.data.target_files import load_from
from vllm_redrafter.data.turns import (
    Dialogue,
    OpenTurn,
    PromptRenderer,
    TargetEngine,
    TurnAnswer,
)
from vllm_redrafter.data.vocabulary import EmbeddedTokens, vocab_size_of
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.progress import progress_bar

LOOK_SECONDS = 1.0
"""Between two looks for a shard that another client has finished or left."""


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
        ended: conversations with a turn that could not be asked after the answers before it.
        kept_shards: found finished.
        others_shards: finished by other clients meanwhile.
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
    ended: LeftOut = field(default_factory=LeftOut)
    kept_shards: int = 0
    others_shards: int = 0
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
        if dialogue.trouble is not None:
            self.ended.add(dialogue.trouble)
        self.skipped += not rows and dialogue.trouble is None
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
        lines += [f"ended early: {reason}" for reason in self.ended.reasons()]
        if self.kept_shards:
            lines.insert(0, f"{self.kept_shards} shards were there already; this run's part:")
        if self.others_shards:
            lines.append(f"{self.others_shards} shards were written by other clients meanwhile")
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

    An output folder that holds a part of the very same data is completed, together with other
    clients that do so now; it returns when all shards are finished, by whomever. The same settings
    give the same data, in one run or in several (in exact arithmetic: an engine rounds differently
    in batches of other sizes, which may change a sampled token now and then).

    Args:
        target: a folder, or a hub id.
        prompts: what to answer; what the target cannot be asked is left out.
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
    embedded = EmbeddedTokens.of(target, tokenizer)
    renderer = PromptRenderer(tokenizer, embedded, settings.system_prompt)
    prompts, left_out = _askable(prompts, renderer, settings.strict)
    if left_out.count:
        console.print(str(left_out), markup=False, highlight=False, soft_wrap=True)
    info = _describe(target, tokenizer, prompts, settings)
    summary = GenerationSummary()
    found = _finished_before(output, info)
    summary.kept_shards = len(found)
    if len(found) == info.num_shards:
        console.print(f"{output} is complete: {info.num_shards} shards", markup=False)
        return summary
    with closing(start_engine(target, settings)) as engine, ShardLeases(output) as leases:
        job = _Generation(engine, info, prompts, renderer, output, found, leases, summary)
        try:
            job.run(console)
            leases.sweep()
            remove_leftovers(output)
        finally:
            done = len(finished_shards(output))
            rest = "; the same command continues" if done < info.num_shards else ""
            finished = f"{done} of {info.num_shards} shards are finished in {output}{rest}"
            console.print(finished, markup=False)
        summary.tokens_per_step = engine.tokens_per_step()
    return summary


def _askable(
    prompts: Sequence[Conversation], renderer: PromptRenderer, strict: bool
) -> tuple[list[Conversation], LeftOut]:
    """What the target can be asked, the same for every client and run; and what is left out."""
    askable, left_out = [], LeftOut(strict)
    for conversation in prompts:
        try:
            renderer.check(conversation)
            askable.append(conversation)
        except UnusableRow as error:
            left_out.add(error)
    if not askable:
        reasons = "; ".join(left_out.reasons())
        raise ConfigError(f"there are no prompts to answer{reasons and ': '}{reasons}")
    return askable, left_out


def _describe(
    target: str, tokenizer: Any, prompts: Sequence[Conversation], settings: GenerationSettings
) -> DatasetInfo:
    """What is to be written into dataset.json."""
    template = tokenizer.chat_template
    return DatasetInfo(
        target=target,
        target_fingerprint=target_fingerprint(target),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_fingerprint=digest(template) if template else None,
        prompts_fingerprint=digest([[c.system, *c.turns] for c in prompts]),
        num_conversations=len(prompts),
        shard_size=settings.shard_size,
        vocab_size=vocab_size_of(target),
        system_prompt=settings.system_prompt,
        sampling=settings.sampling,
    )


def _finished_before(output: Path, info: DatasetInfo) -> list[int]:
    """The shards that are there; the folder is made, and described, where it is new.

    Raises:
        ConfigError: the folder holds other data, or cannot be written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not (output / INFO_FILE).exists():
            if finished_shards(output):
                raise ConfigError(
                    f"--output {output} holds shards without a {INFO_FILE}: nobody knows what "
                    "they are; give another folder, or delete this one"
                )
            info.save(output, writer=secrets.token_hex(8))
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written to: {error}") from error
    # Read again, if it was written just now: another client may have been the first.
    if differences := DatasetInfo.load(output).differences(info):
        raise ConfigError(
            f"--output {output} holds data of other settings, which cannot be continued with "
            f"these: {'; '.join(differences)}. Give the former settings or another folder, or "
            "delete this one"
        )
    return finished_shards(output)


class _Generation:
    """Conversations on their way from the prompts through the engine into shards."""

    def __init__(
        self,
        engine: TargetEngine,
        info: DatasetInfo,
        prompts: Sequence[Conversation],
        renderer: PromptRenderer,
        output: Path,
        found: Sequence[int],
        leases: ShardLeases,
        summary: GenerationSummary,
    ) -> None:
        self._engine, self._info, self._output = engine, info, output
        self._prompts, self._renderer = prompts, renderer
        self._leases, self._summary = leases, summary
        self._waiting: deque[OpenTurn] = deque()
        self._running: dict[int, Dialogue] = {}
        # Finished conversations of the shards that this client leases.
        self._shards: dict[int, dict[int, list[Row]]] = {}
        self._new: Iterator[Dialogue] = iter(())
        self._written: set[int] = set()
        # What others finished while the engine started is theirs, and noted as such.
        self._finished = set(found)
        self._looks_at = 0.0

    def run(self, console: Console) -> None:
        """Write shards until all are there, as many conversations at a time as the engine takes."""
        started = time.monotonic()
        with progress_bar(console) as progress:
            total = self._info.num_conversations
            task = progress.add_task("conversations", total=total, completed=0, status="")
            said = False
            while True:
                self._admit()
                for answer in self._engine.answers(self._waiting):
                    self._summary.seconds = time.monotonic() - started
                    self._take(answer)
                    self._admit()
                    status = f"{self._summary.tokens_per_second:.0f} tokens/s"
                    progress.update(task, completed=self._completed(), status=status)
                progress.update(task, completed=self._completed(), status="")
                if len(self._finished) == self._info.num_shards:
                    break
                if not said:
                    said = True
                    line = "the shards that are left are other clients'; waiting until they end"
                    console.print(line, markup=False)
                time.sleep(LOOK_SECONDS)

    def _take(self, answer: TurnAnswer) -> None:
        self._summary.answers += 1
        self._summary.tokens += len(answer.tokens)
        dialogue = self._running.pop(answer.conversation)
        dialogue.take(answer)
        self._go_on(dialogue)

    def _completed(self) -> int:
        """Conversations in finished shards, whoever wrote them, and others that are finished."""
        in_shards = sum(len(self._info.conversations_of(shard)) for shard in self._finished)
        return in_shards + sum(map(len, self._shards.values()))

    def _admit(self) -> None:
        """Start new conversations where there is room for them."""
        while len(self._running) < self._engine.in_flight:
            dialogue = next(self._new, None)
            if dialogue is not None:
                self._go_on(dialogue)
            elif not self._lease_another():
                return

    def _lease_another(self) -> bool:
        """Is there another shard to write? Looked for now and then, where there was none."""
        now = time.monotonic()
        if now < self._looks_at:
            return False
        self._note_finished()
        shards = range(self._info.num_shards)
        open_shards = [s for s in shards if s not in self._finished and s not in self._shards]
        shard = self._leases.take(open_shards)
        if shard is None:
            self._looks_at = now + LOOK_SECONDS
            return False
        if shard in finished_shards(self._output):  # between the look and the lease
            self._leases.release(shard)
            return True
        self._shards[shard] = {}
        self._new = (
            Dialogue(
                index,
                self._prompts[index],
                self._renderer,
                self._info.sampling,
                self._engine.max_model_len,
            )
            for index in self._info.conversations_of(shard)
        )
        return True

    def _note_finished(self) -> None:
        now = set(finished_shards(self._output))
        self._summary.others_shards += len(now - self._finished - self._written)
        self._finished |= now

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
            write_shard(self._output, shard, rows, self._leases.client)
            self._written.add(shard)
            self._finished.add(shard)
            del self._shards[shard]
            self._leases.release(shard)
