# SPDX-License-Identifier: Apache-2.0
"""Training data from the target itself: it answers prompts, and the answers go into shards.

A shard is written when all its conversations are finished; the next run writes missing ones.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from vllm_redrafter.data.conversation_rows import Conversation, LeftOut, UnusableRow
from vllm_redrafter.data.dataset import DatasetInfo, write_shard
from vllm_redrafter.data.fingerprint import digest, tokenizer_fingerprint
from vllm_redrafter.data.output_folder import Part
from vllm_redrafter.data.rows import Row
from vllm_redrafter.data.settings import GenerationSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import Dialogue, OpenTurn, PromptRenderer, TargetEngine
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.progress import progress_bar


@dataclass
class GenerationSummary:
    """What one run did; shards that were there before are not counted.

    Attributes:
        cut_answers: those that reached `max_tokens`.
        truncated: conversations that lost turns or tokens, because `max_model_len` was reached.
        skipped: conversations whose first prompt is too long already: they have no row.
        ended: conversations with a turn that could not be asked after the answers before it.
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
    seconds: float = 0.0

    def add(self, dialogue: Dialogue) -> None:
        """Count a finished conversation; its answers are counted already."""
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
            f"{self.tokens} tokens, {self.tokens / (self.answers or 1):.1f} per answer "
            f"({self.cut_answers} answers were cut at max-tokens)",
            f"{self.truncated} conversations were truncated and {self.skipped} skipped, being "
            "longer than the model allows",
            f"{self.seconds:.0f} s, {self.tokens / (self.seconds or 1):.0f} tokens per second",
        ]
        lines += [f"ended early: {reason}" for reason in self.ended.reasons()]
        if self.kept_shards:
            lines.insert(0, f"{self.kept_shards} shards were there already; this run wrote:")
        return "\n".join(lines)


def generate_data(
    target: str,
    prompts: Sequence[Conversation],
    output: Path,
    start_engine: Callable[[Target, GenerationSettings], TargetEngine],
    settings: GenerationSettings | None = None,
    console: Console | None = None,
) -> GenerationSummary:
    """Let the target, a folder or hub id, answer the prompts, and write a folder of `dataset.py`.

    Finished shards are kept. The same settings give the same data, in any number of runs and parts,
    but for rounding in batches of other sizes. Prompts that the target cannot be asked are left
    out. `start_engine` starts the target, such as `OfflineEngine` with vLLM.

    ConfigError: a prompt, target or folder that cannot work; the folder holds data of other
    settings; another process writes this part; the disk is full.
    """
    settings, console = settings or GenerationSettings(), console or Console()
    opened = Target.open(target)
    renderer = PromptRenderer(opened.tokenizer, opened.embedded, settings.system_prompt)
    prompts = _askable(prompts, renderer, console)
    info = _describe(opened, prompts, settings)
    part, summary = Part.parse(settings.part), GenerationSummary()
    own = part.shards(info.num_shards)
    with info.missing_shards(output, part, info.num_shards) as missing:
        summary.kept_shards = len(own) - len(missing)
        try:
            if missing:
                with closing(start_engine(opened, settings)) as engine:
                    run = _Generation(engine, info, prompts, renderer, output, missing, summary)
                    run.run(console)
        finally:
            finished = set(info.finished_shards(output))
            rest = ""
            if not finished.issuperset(own):
                rest = "; the same command continues"
            elif not finished.issuperset(range(info.num_shards)):
                rest = "; other parts are missing still"
            line = f"{len(finished)} of {info.num_shards} shards are finished in {output}{rest}"
            console.print(line, markup=False)
    return summary


def _askable(
    prompts: Sequence[Conversation], renderer: PromptRenderer, console: Console
) -> list[Conversation]:
    """The prompts that the target can be asked, the same for every part and run."""
    askable, left_out = [], LeftOut()
    for conversation in prompts:
        try:
            renderer.check(conversation)
            askable.append(conversation)
        except UnusableRow as error:
            left_out.add(error)
    if not askable:
        reasons = "; ".join(left_out.reasons())
        raise ConfigError(f"there are no prompts to answer{reasons and ': '}{reasons}")
    if left_out.count:
        console.print(str(left_out), markup=False, highlight=False, soft_wrap=True)
    return askable


def _describe(
    target: Target, prompts: Sequence[Conversation], settings: GenerationSettings
) -> DatasetInfo:
    template = target.tokenizer.chat_template
    return DatasetInfo(
        target=target.name,
        target_fingerprint=target.fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        template_fingerprint=digest(template) if template else None,
        prompts_fingerprint=digest([[c.system, *c.turns] for c in prompts]),
        num_conversations=len(prompts),
        shard_size=settings.shard_size,
        vocab_size=target.vocab_size,
        system_prompt=settings.system_prompt,
        sampling=settings.sampling,
    )


class _Generation:
    """Conversations on their way from the prompts through the engine into the missing shards."""

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
        self._engine, self._info, self._output = engine, info, output
        self._summary = summary
        self._waiting: deque[OpenTurn] = deque()
        self._running: dict[int, Dialogue] = {}
        indices = [index for shard in missing for index in info.conversations_of(shard)]
        self._total = len(indices)
        self._new = (
            Dialogue(i, prompts[i], renderer, info.sampling, engine.max_model_len) for i in indices
        )
        # By shard, the rows of its finished conversations.
        self._rows: defaultdict[int, dict[int, list[Row]]] = defaultdict(dict)

    def run(self, console: Console) -> None:
        """Write the missing shards."""
        started = time.monotonic()
        with progress_bar(console) as progress:
            task = progress.add_task("conversations", total=self._total, completed=0, status="")
            self._admit()
            for answer in self._engine.answers(self._waiting):
                self._summary.seconds = time.monotonic() - started
                self._summary.answers += 1
                self._summary.tokens += len(answer.tokens)
                dialogue = self._running.pop(answer.conversation)
                dialogue.take(answer)
                self._go_on(dialogue)
                self._admit()
                status = f"{self._summary.tokens / (self._summary.seconds or 1):.0f} tokens/s"
                progress.update(task, completed=self._summary.conversations, status=status)

    def _admit(self) -> None:
        """Start new conversations where there is room for them."""
        while len(self._running) < self._engine.in_flight:
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
        finished = self._rows[shard]
        finished[dialogue.index] = dialogue.rows()
        if len(finished) == len(self._info.conversations_of(shard)):
            # Conversations end in any order; data has that of the prompts.
            rows = [row for index in sorted(finished) for row in finished[index]]
            write_shard(self._output, shard, rows)
            del self._rows[shard]
