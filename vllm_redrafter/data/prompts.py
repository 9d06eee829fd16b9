"""Prompts for the target: from a file, or from a dataset of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_redrafter.errors import ConfigError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""OpenAI's names of roles and ShareGPT's; what else stands there (tools) cannot be answered."""

EXPECTED = (
    '{"prompt": "..."}, {"messages": [{"role": "user", "content": "..."}, ...]} or '
    '{"conversations": [{"from": "human", "value": "..."}, ...]}'
)


@dataclass(frozen=True)
class Conversation:
    """What a user says; the target writes the answers.

    Attributes:
        turns: the user's messages, in order; at least one.
        system: the system message, or None.
        source: where it was read, for error messages; two conversations from different places
            are equal if they say the same.

    Raises:
        ConfigError: there is no turn, or an empty one.
    """

    turns: tuple[str, ...]
    system: str | None = None
    source: str = field(default="a prompt", compare=False)

    def __post_init__(self) -> None:
        if not self.turns or not all(turn.strip() for turn in self.turns):
            raise ConfigError(f"{self.source}: expected text, got {self.turns!r}")


def read_prompts(source: str, split: str | None = None) -> tuple[list[Conversation], int]:
    """Read prompts for the target to answer.

    Files are told by their ending: `.txt` (a line is a prompt), `.jsonl`, `.json` (a list) and
    `.parquet`, with rows as in `EXPECTED`; a row with messages and a prompt is taken for a
    conversation. Assistant turns are dropped, for the target writes them anew. Conversations in
    which the user says nothing, of which ShareGPT has many, are left out.

    Args:
        source: a file, the id of a dataset on the hub, or a folder that `datasets` can load.
        split: of the dataset; None is its `train` split.

    Returns:
        The conversations, and how many were left out.

    Raises:
        ConfigError: no such source, an empty or malformed row (which one, what was found, what is
            expected), or no usable prompt at all.
    """
    rows = _rows(source, split)
    read = [_conversation(row, at) for at, row in rows]
    usable = [conversation for conversation in read if conversation is not None]
    if not usable:
        raise ConfigError(
            f"{source}: no usable prompt among its {len(read)} rows; expected {EXPECTED}"
        )
    return usable, len(read) - len(usable)


def _rows(source: str, split: str | None) -> Iterator[tuple[str, Any]]:
    """Each row with its place, such as `prompts.jsonl, line 3`."""
    path = Path(source).expanduser()
    reader = READERS.get(path.suffix)
    if path.is_file() or reader is not None:
        if not path.is_file():
            raise ConfigError(f"--prompts {source}: no such file")
        if reader is None:
            raise ConfigError(
                f"--prompts {source}: unknown format {path.suffix!r}; expected {', '.join(READERS)}"
            )
        if split is not None:
            raise ConfigError(
                f"--split {split} is for datasets, and --prompts {source} is a file: leave it out"
            )
        return reader(path)
    if source.startswith((".", "/", "~")) and not path.is_dir():
        raise ConfigError(f"--prompts {source}: no such file or folder")
    return _dataset_rows(str(path) if path.is_dir() else source, split or "train")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            at = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{at}: expected UTF-8 text: {error}") from error
            if text.strip():
                yield at, text


def _txt_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for at, text in _lines(path):
        yield at, {"prompt": text}


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for at, text in _lines(path):
        try:
            yield at, json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{at}: not JSON ({error}), found {_shortened(text)}; expected {EXPECTED}"
            ) from error


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # malformed JSON or UTF-8; the former names the line
        raise ConfigError(f"{path}: not JSON: {error}; expected a list of {EXPECTED}") from error
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path}: expected a list of rows, found {_shortened(rows)}; "
            "one JSON object per line belongs into a file named .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: not readable as Parquet: {error}") from error


def _dataset_rows(name: str, split: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        # Streaming: the rows are read once, and no copy of them stays in a cache.
        for number, row in enumerate(load_dataset(name, split=split, streaming=True), start=1):
            yield f"{name}, split {split}, row {number}", row
    except ConfigError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        raise ConfigError(
            f"--prompts {name}: neither a file nor a dataset that can be loaded with split "
            f"{split!r} (--split names another): {error}"
        ) from error


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".txt": _txt_rows,
}


def _conversation(row: Any, at: str) -> Conversation | None:
    """A row's conversation; None where the user says nothing in it."""
    if not isinstance(row, dict):
        raise ConfigError(f"{at}: found {_shortened(row)}; expected {EXPECTED}")
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if row.get(key) is not None:
            return _from_messages(row[key], role, content, f"{at}: {key!r}")
    prompt = row.get("prompt")
    if prompt is None:
        keys = ", ".join(map(repr, row)) or "nothing"
        raise ConfigError(f"{at}: found {keys}; expected {EXPECTED}")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{at}: 'prompt' must be text, found {_shortened(prompt)}")
    return Conversation((prompt,), source=at)


def _from_messages(messages: Any, role_key: str, content_key: str, at: str) -> Conversation | None:
    if not isinstance(messages, list):
        raise ConfigError(f"{at} must be a list, found {_shortened(messages)}")
    system, turns = None, []
    for position, message in enumerate(messages):
        role, content = _message(message, role_key, content_key, f"{at}[{position}]")
        if role == "system":
            if position > 0:
                raise ConfigError(f"{at}[{position}]: a system message must be the first one")
            system = content if content.strip() else None
        elif role == "user" and content.strip():
            turns.append(content)
    return Conversation(tuple(turns), system, source=at.split(": ")[0]) if turns else None


def _message(message: Any, role_key: str, content_key: str, at: str) -> tuple[str, str]:
    """Role (`system`, `user` or `assistant`) and text."""
    found = message if isinstance(message, dict) else {}
    role, content = found.get(role_key), found.get(content_key)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(
            f"{at} must have {role_key!r} and {content_key!r}, both text; "
            f"found {_shortened(message)}"
        )
    if role not in ROLES:
        raise ConfigError(f"{at}: unknown role {role!r}; expected one of {', '.join(ROLES)}")
    return ROLES[role], content


def _shortened(value: Any, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "…"
