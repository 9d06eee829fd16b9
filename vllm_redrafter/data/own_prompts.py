# SPDX-License-Identifier: Apache-2.0
"""Prompts without a dataset: the target writes the user's turns itself.

Magpie (arXiv 2406.08464): an instruct model, given its chat template up to the user's turn, goes on
with what a user would say. The file has the order of the attempts, each of which has its seed: the
same command continues a stopped run, to the same prompts.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_redrafter.data.chat_template import MARK, ChatTemplate
from vllm_redrafter.data.fingerprint import digest
from vllm_redrafter.data.output_folder import check_same
from vllm_redrafter.data.settings import GenerationSettings, PromptSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import OpenTurn, TargetEngine, answer_seed
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import lock, whole_file, writing
from vllm_redrafter.utils.json_files import parse_json, read_json
from vllm_redrafter.utils.progress import progress_bar

PATIENCE = 2048
"""Attempts in a row that may bring nothing new."""

MIN_CHARACTERS = 12
"""A shorter prompt is left out."""

_OWN_PROMPTS = "give generate-data --prompts of your own, such as a .txt with one in each line"


@dataclass(frozen=True)
class _TurnPlace:
    """Token ids before the user's turn, and the id of the special token that ends it."""

    prompt: list[int]
    end: int


@dataclass
class PromptSummary:
    """What one run did: prompts written, prompts found in the file, and attempts left out."""

    prompts: int = 0
    found: int = 0
    unfinished: int = 0
    short: int = 0
    repeated: int = 0

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts written, {self.found} were there; left out: "
            f"{self.unfinished} without an end, {self.short} too short, {self.repeated} repeated"
        )


def place_of_turn(tokenizer: Any, system_prompt: str | None) -> _TurnPlace:
    """The place of the user's turn in the chat template, behind the system message if any."""
    if not tokenizer.chat_template:
        raise ConfigError(
            "the target's tokenizer has no chat template, so the target cannot write a user's "
            f"turn: {_OWN_PROMPTS}"
        )
    try:
        text = ChatTemplate(tokenizer).apply(_messages(system_prompt, MARK))
    except ConfigError as error:
        remedy = "leave --system-prompt out" if system_prompt is not None else _OWN_PROMPTS
        raise ConfigError(f"a user's turn: {error}; {remedy}") from error
    before, found, after = text.partition(MARK)
    if not found or not after.strip():
        raise ConfigError(
            f"the target's chat template does not show where the user's turn ends: {_OWN_PROMPTS}"
        )
    prompt = tokenizer(before, add_special_tokens=False)["input_ids"]
    first = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"][0]
    special = {
        *tokenizer.all_special_ids,
        *(id for id, token in tokenizer.added_tokens_decoder.items() if token.special),
    }
    if first not in special:
        raise ConfigError(
            "the target's chat template ends the user's turn with mere text, which the target may "
            f"write as well: {_OWN_PROMPTS}"
        )
    return _TurnPlace(prompt, first)


def make_prompts(
    target: str,
    output: Path,
    start_engine: Callable[[Target, GenerationSettings], TargetEngine],
    settings: PromptSettings | None = None,
    console: Console | None = None,
) -> PromptSummary:
    """Let the target, a folder or hub id, write prompts into a file that `generate-data` reads.

    The file has JSON lines, each with `messages` and the number of the attempt. `start_engine`
    starts the target, such as `OfflineEngine` with vLLM. ConfigError: no such target, one without a
    chat template or without embeddings of what it writes; a file that holds something else; or
    attempts bring nothing new any more.
    """
    settings, console = settings or PromptSettings(), console or Console()
    opened = Target.open(target)
    tokenizer = opened.tokenizer
    place = place_of_turn(tokenizer, settings.system_prompt)
    if trouble := opened.embedded.trouble([*place.prompt, place.end]):
        raise ConfigError(
            f"target {target!r} cannot read what its chat template or the system prompt makes: "
            f"{trouble}; give a target with the tokenizer that it was trained with"
        )
    made_with = {
        "target_fingerprint": opened.fingerprint,
        "template_fingerprint": digest(tokenizer.chat_template),
        "system_prompt": settings.system_prompt,
        "min_characters": MIN_CHARACTERS,
        **asdict(settings.sampling),
    }
    with closing(_PromptFile(output, made_with)) as file:
        summary = PromptSummary(found=len(file))
        if len(file) < settings.num_prompts:
            console.print(f"starting the engine with {target}", markup=False)
            of_engine = GenerationSettings(
                settings.sampling, in_flight=settings.in_flight, engine=settings.engine
            )
            with closing(start_engine(opened, of_engine)) as engine:
                _Attempts(engine, tokenizer, place, settings, file, summary).run(console)
    return summary


class _Attempts:
    """Turns on their way from the engine into the file."""

    def __init__(
        self,
        engine: TargetEngine,
        tokenizer: Any,
        place: _TurnPlace,
        settings: PromptSettings,
        file: _PromptFile,
        summary: PromptSummary,
    ) -> None:
        self._engine, self._tokenizer, self._place = engine, tokenizer, place
        self._settings, self._file, self._summary = settings, file, summary
        self._next = file.next_attempt
        self._room = engine.max_model_len - len(place.prompt)
        if self._room < 1:
            raise ConfigError(
                f"the chat template has {len(place.prompt)} tokens before the user's turn, and "
                f"only {engine.max_model_len} fit: raise --max-model-len, or shorten the system "
                "prompt"
            )

    def run(self, console: Console) -> None:
        """Attempt until the file has as many prompts as it shall."""
        wanted, last_new = self._settings.num_prompts, self._next
        with progress_bar(console) as progress:
            task = progress.add_task("prompts", total=wanted, completed=len(self._file), status="")
            for attempt, tokens, ended in self._in_order():
                if self._take(attempt, tokens, ended):
                    last_new = attempt
                status = f"{attempt + 1} attempts"
                progress.update(task, completed=len(self._file), status=status)
                if len(self._file) == wanted:
                    return
                if attempt - last_new >= PATIENCE:
                    raise ConfigError(
                        f"{PATIENCE} attempts brought no new prompt; {len(self._file)} are in "
                        "the file: lower --num-prompts, or raise --temperature"
                    )

    def _in_order(self) -> Iterator[tuple[int, list[int], bool]]:
        """Attempts as they were numbered: (number, tokens, did it end), without end."""
        waiting = deque(self._turn() for _ in range(self._settings.in_flight))
        early: dict[int, tuple[list[int], bool]] = {}
        due = self._file.next_attempt
        for answer in self._engine.answers(waiting):
            waiting.append(self._turn())
            early[answer.conversation] = answer.tokens, answer.ended
            while due in early:
                yield due, *early.pop(due)
                due += 1

    def _turn(self) -> OpenTurn:
        attempt, self._next = self._next, self._next + 1
        sampling = self._settings.sampling
        max_tokens = min(sampling.max_tokens, self._room)
        seed = answer_seed(sampling.seed, attempt, 0)
        return OpenTurn(attempt, 0, self._place.prompt, max_tokens, seed, self._place.end)

    def _take(self, attempt: int, tokens: list[int], ended: bool) -> bool:
        """Is it a new prompt? Then it is in the file now."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
        if not ended:
            self._summary.unfinished += 1
        elif len(text) < MIN_CHARACTERS:
            self._summary.short += 1
        elif not self._file.add(_messages(self._settings.system_prompt, text), attempt):
            self._summary.repeated += 1
        else:
            self._summary.prompts += 1
            return True
        return False


def _messages(system_prompt: str | None, text: str) -> list[dict[str, str]]:
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": text}]


class _PromptFile:
    """A file of different prompts, each with the number of the attempt that made it.

    PATH.made-with.json beside it has `made_with`, all that the prompts depend on. ConfigError: the
    file was made otherwise, another process is writing it, or it cannot be written.
    """

    def __init__(self, path: Path, made_with: dict[str, Any]) -> None:
        self._path = path.expanduser()
        record = self._path.with_name(f"{self._path.name}.made-with.json")
        with writing(f"--output {path}", "name another file"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists() or not self._path.stat().st_size
            self._file = self._path.open("a+b")
        try:
            busy = f"--output {path}: another process is writing there"
            lock(self._file, f"{busy}; wait for it to end, or give another file")
            if is_new:
                with whole_file(record) as file:
                    file.write((json.dumps(made_with, indent=2) + "\n").encode())
            else:
                check_same(self._path, _made_with(self._path, record), made_with)
            self._seen: set[str] = set()
            self.next_attempt = 0
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, messages: list[dict[str, str]], attempt: int) -> bool:
        """Append a prompt, the last message; False where it is there already.

        Case and blanks do not count. Attempts come in ascending order.
        """
        same = _normalised(messages[-1]["content"])
        if same in self._seen:
            return False
        line = json.dumps({"messages": messages, "attempt": attempt}, ensure_ascii=False) + "\n"
        kept = "what is in it is kept: make room and start the same command again"
        with writing(self._path, kept):
            self._file.write(line.encode())
            self._file.flush()
        self._seen.add(same)
        self.next_attempt = attempt + 1
        return True

    def _read(self) -> None:
        """Take over what is there; the line that a killed run did not finish is cut off."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = parse_json(line)
                text = row["messages"][-1]["content"]
                self.next_attempt = int(row["attempt"]) + 1
            except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
                raise ConfigError(
                    f"{self._path}, line {number}: not what make-prompts writes ({error!r}); give "
                    "another --output"
                ) from error
            self._seen.add(_normalised(text))
            whole += len(line)
        self._file.truncate(whole)


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def _made_with(path: Path, record: Path) -> dict[str, Any]:
    try:
        return dict(read_json(record))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--output {path} exists, and {record.name}, which would say how it was made, cannot "
            "be read: give another file"
        ) from error
