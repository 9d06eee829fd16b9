"""Prompts: from the command line or a dataset file, as the token ids that every engine is given."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from throughput_methods import InputError

Message: TypeAlias = dict[str, str]
Prompt: TypeAlias = str | list[Message]
"""Text, or the opening of a conversation: its messages up to the user's first."""

TEXT_KEYS = ("prompt", "text")
CONVERSATION_KEYS = ("conversations", "messages")
ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names for roles; others are taken as they are."""


def read_dataset(path: Path) -> tuple[list[Prompt], int]:
    """The prompts of a dataset file, and how many conversations were left out.

    Formats, by the file's ending:
        .txt: one prompt per line.
        .jsonl, .json (a list), .parquet: records with `prompt` or `text` (a string), `turns`
            (strings, the user's; MT-Bench), or `conversations` or `messages` (ShareGPT's
            `from`/`value` or OpenAI's `role`/`content`). Conversations without any text from the
            user, of which ShareGPT has many, are left out.

    Raises:
        InputError: no such file, unknown format, or a malformed record, which is named.
    """
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
        ".jsonl": _jsonl_records,
        ".json": _json_records,
        ".parquet": _parquet_records,
    }
    if not path.is_file():
        raise InputError(f"--dataset {path}: no such file")
    if path.suffix == ".txt":
        prompts: list[Prompt | None] = [line for line in _lines(path) if line.strip()]
    elif path.suffix in readers:
        prompts = [_prompt_of(record, at) for at, record in readers[path.suffix](path)]
    else:
        raise InputError(
            f"--dataset {path}: unknown format {path.suffix!r}: expected .txt, {', '.join(readers)}"
        )
    usable = [prompt for prompt in prompts if prompt is not None]
    if not usable:
        raise InputError(f"--dataset {path}: there is no prompt in it")
    return usable, len(prompts) - len(usable)


def _lines(path: Path) -> list[str]:
    try:
        # Not splitlines(): JSON strings may hold U+2028 and the like as they are.
        return path.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"--dataset {path}: not UTF-8 text: {error}") from error


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            at = f"--dataset {path}, line {number}"
            try:
                yield at, json.loads(line)
            except ValueError as error:
                raise InputError(f"{at}: not JSON: {error}") from error


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads("\n".join(_lines(path)))
    except ValueError as error:
        raise InputError(f"--dataset {path}: not JSON: {error}") from error
    if not isinstance(records, list):
        raise InputError(f"--dataset {path}: expected a list of records")
    for number, record in enumerate(records, start=1):
        yield f"--dataset {path}, record {number}", record


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        records = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise InputError(f"--dataset {path}: not a Parquet file: {error}") from error
    for number, record in enumerate(records, start=1):
        yield f"--dataset {path}, row {number}", record


def _prompt_of(record: Any, at: str) -> Prompt | None:
    """The prompt in a record; None for a conversation in which the user says nothing."""
    if not isinstance(record, dict):
        raise InputError(f"{at}: expected an object, got {type(record).__name__}")
    for key in TEXT_KEYS:
        if key in record:
            text = record[key]
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{at}: {key!r} must be text, got {text!r}")
            return text
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise InputError(f"{at}: 'turns' must be a list of texts")
        return _opening([{"role": "user", "content": turn} for turn in turns])
    for key in CONVERSATION_KEYS:
        if key in record:
            return _opening(_messages(record[key], f"{at}: {key!r}"))
    known = (*TEXT_KEYS, "turns", *CONVERSATION_KEYS)
    raise InputError(f"{at}: none of {', '.join(known)} in it")


def _messages(turns: Any, at: str) -> list[Message]:
    messages = []
    for turn in turns if isinstance(turns, list) else [turns]:
        role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        content = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise InputError(
                f"{at} must be a list of messages, each with 'from' and 'value', or 'role' and "
                f"'content', as text; got {str(turn)[:80]!r}"
            )
        messages.append({"role": ROLES.get(role, role), "content": content})
    return messages


def _opening(messages: list[Message]) -> list[Message] | None:
    """The system's messages and the user's first; None where the user's part is empty."""
    opening = []
    for message in messages:
        if message["role"] == "system":
            opening.append(message)
        elif message["role"] == "user" and message["content"].strip():
            return [*opening, message]
    return None


def tokenize(prompts: Sequence[Prompt], tokenizer: Any, chat: bool | None) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        prompts: text or messages.
        tokenizer: the target's, from transformers.
        chat: put prompts through the target's chat template; None does so for conversations,
            where the target has a template.

    Raises:
        InputError: `chat` with a target that has no chat template.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise InputError("--chat: the target's tokenizer has no chat template")
    rows = []
    for prompt in prompts:
        if chat or (chat is None and has_template and not isinstance(prompt, str)):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            rows.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            rows.append(tokenizer.encode(text))
    return rows


def choose(
    prompts: Sequence[list[int]], count: int, longest: int | None, at_least: int, seed: int
) -> list[list[int]]:
    """Up to `count` prompts, drawn at random where there are more, repeated in turn where needed.

    Args:
        prompts: token ids.
        count: how many are wanted.
        longest: the most tokens in a prompt that leaves room for the output; longer ones are
            left out.
        at_least: the highest concurrency: with fewer prompts, so many would never be in flight.
        seed: of the draw.

    Raises:
        InputError: no prompt is short enough, or one has no token.
    """
    if not all(prompts):
        raise InputError("a prompt is empty: the target's tokenizer makes no token of it")
    fitting = [prompt for prompt in prompts if longest is None or len(prompt) <= longest]
    if not fitting:
        raise InputError(
            f"no prompt fits: the shortest has {min(map(len, prompts))} tokens, and only {longest} "
            "leave room for --max-tokens within the target's maximum length"
        )
    if len(fitting) > count:
        fitting = random.Random(seed).sample(fitting, count)
    missing = max(0, at_least - len(fitting))
    return fitting + [fitting[i % len(fitting)] for i in range(missing)]
