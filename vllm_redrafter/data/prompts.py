"""Prompts for the target: from a file, or from a dataset of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from vllm_redrafter.errors import ConfigError
from vllm_redrafter.json_files import parse_json

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""OpenAI's names of roles and ShareGPT's; what else stands there (tools) cannot be answered."""

MESSAGE_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Where a row has messages, and where a message has its role and its text."""

EXPECTED = (
    '{"prompt": "..."}, {"messages": [{"role": "user", "content": "..."}, ...]} or '
    '{"conversations": [{"from": "human", "value": "..."}, ...]}'
)
EXPECTED_OPENING = f'{{"text": "..."}}, {{"turns": ["...", ...]}}, {EXPECTED}'


PlacedRow: TypeAlias = tuple[str, Any]
"""A row and before it its place, such as `prompts.jsonl, line 3`."""


@dataclass(frozen=True)
class Conversation:
    """What a user says; the target writes the answers.

    Attributes:
        turns: the user's messages, in order; at least one.
        system: the system message, or None.
        bare: read as mere text, not as the messages of a chat.
        source: where it was read, for error messages; two conversations from different places
            are equal if they say the same.

    Raises:
        ConfigError: there is no turn, or an empty one.
    """

    turns: tuple[str, ...]
    system: str | None = None
    bare: bool = field(default=False, compare=False)
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
    return _usable(source, _rows(source, split), opening=False)


def read_openings(path: Path) -> tuple[list[Conversation], int]:
    """Read how conversations begin, up to the user's first turn: all that a benchmark needs.

    Files are those of `read_prompts`. A row may also have `text` instead of `prompt`, or `turns`,
    which are the user's (MT-Bench); messages may have OpenAI's keys or ShareGPT's under any name,
    and those of unknown roles are passed over.

    Returns:
        The openings, of one turn each, and how many conversations without any were left out.

    Raises:
        ConfigError: no such file, unknown format, a malformed row, or no usable prompt at all.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    return _usable(str(path), _file_rows(path), opening=True)


def _usable(
    source: str, rows: Iterable[PlacedRow], opening: bool
) -> tuple[list[Conversation], int]:
    """The conversations in which the user says something, and how many others there are."""
    read = [_conversation(row, at, opening) for at, row in rows]
    usable = [conversation for conversation in read if conversation is not None]
    if not usable:
        expected = EXPECTED_OPENING if opening else EXPECTED
        raise ConfigError(
            f"{source}: no usable prompt among its {len(read)} rows; expected {expected}"
        )
    return usable, len(read) - len(usable)


def _rows(source: str, split: str | None) -> Iterator[PlacedRow]:
    path = Path(source).expanduser()
    if path.is_file() or path.suffix in READERS:
        if not path.is_file():
            raise ConfigError(f"--prompts {source}: no such file")
        rows = _file_rows(path)
        if split is not None:
            raise ConfigError(
                f"--split {split} is for datasets, and --prompts {source} is a file: leave it out"
            )
        return rows
    if source.startswith((".", "/", "~")) and not path.is_dir():
        raise ConfigError(f"--prompts {source}: no such file or folder")
    return _dataset_rows(str(path) if path.is_dir() else source, split or "train")


def _file_rows(path: Path) -> Iterator[PlacedRow]:
    reader = READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path}: unknown format {path.suffix!r}; expected {', '.join(READERS)}")
    return reader(path)


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


def _txt_rows(path: Path) -> Iterator[PlacedRow]:
    for at, text in _lines(path):
        yield at, {"prompt": text}


def _jsonl_rows(path: Path) -> Iterator[PlacedRow]:
    for at, text in _lines(path):
        try:
            yield at, parse_json(text)
        except ValueError as error:
            raise ConfigError(
                f"{at}: not JSON ({error}), found {_shortened(text)}; expected {EXPECTED}"
            ) from error


def _json_rows(path: Path) -> Iterator[PlacedRow]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # malformed JSON or UTF-8; the former names the line
        raise ConfigError(f"{path}: not JSON: {error}; expected a list of {EXPECTED}") from error
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path}: expected a list of rows, found {_shortened(rows)}; "
            "one JSON object per line belongs into a file named .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _parquet_rows(path: Path) -> Iterator[PlacedRow]:
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


def _dataset_rows(name: str, split: str) -> Iterator[PlacedRow]:
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


READERS: dict[str, Callable[[Path], Iterator[PlacedRow]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".txt": _txt_rows,
}


def _conversation(row: Any, at: str, opening: bool) -> Conversation | None:
    """A row's conversation, or only how it begins; None where the user says nothing in it."""
    expected = EXPECTED_OPENING if opening else EXPECTED
    if not isinstance(row, dict):
        raise ConfigError(f"{at}: found {_shortened(row)}; expected {expected}")
    for name, keys in MESSAGE_KEYS.items():
        if row.get(name) is not None:
            accepted = list(MESSAGE_KEYS.values()) if opening else [keys]
            return _from_messages(row[name], accepted, f"{at}: {name!r}", opening)
    if opening and row.get("turns") is not None:
        return _from_turns(row["turns"], at)
    for name in ("prompt", "text") if opening else ("prompt",):
        if (text := row.get(name)) is not None:
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(f"{at}: {name!r} must be text, found {_shortened(text)}")
            return Conversation((text,), bare=True, source=at)
    found = ", ".join(map(repr, row)) or "nothing"
    raise ConfigError(f"{at}: found {found}; expected {expected}")


def _from_turns(turns: Any, at: str) -> Conversation | None:
    """How a conversation begins of which the row has the user's turns alone."""
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(f"{at}: 'turns' must be a list of texts, found {_shortened(turns)}")
    first = next((turn for turn in turns if turn.strip()), None)
    return None if first is None else Conversation((first,), source=at)


def _from_messages(
    messages: Any, accepted: Sequence[tuple[str, str]], at: str, opening: bool
) -> Conversation | None:
    """A conversation from messages; for its opening they are read up to the user's first turn.

    Args:
        messages: of one row.
        accepted: pairs of keys, one for a message's role and one for its text.
        at: where the messages stand.
        opening: only how the conversation begins is asked for.
    """
    if not isinstance(messages, list):
        raise ConfigError(f"{at} must be a list, found {_shortened(messages)}")
    system: list[str] = []
    turns: list[str] = []
    for position, message in enumerate(messages):
        place = f"{at}[{position}]"
        name, content = _message(message, accepted, place)
        if not opening:
            _check_role(name, position, place)
        role = ROLES.get(name)
        if role == "system" and content.strip():
            system.append(content)
        elif role == "user" and content.strip():
            turns.append(content)
            if opening:
                break
    if not turns:
        return None
    return Conversation(tuple(turns), "\n\n".join(system) or None, source=at.split(": ")[0])


def _message(message: Any, accepted: Sequence[tuple[str, str]], at: str) -> tuple[str, str]:
    """Role, as it is named there, and text."""
    found = message if isinstance(message, dict) else {}
    for role_key, content_key in accepted:
        role, content = found.get(role_key), found.get(content_key)
        if isinstance(role, str) and isinstance(content, str):
            return role, content
    keys = " or ".join(f"{role!r} and {content!r}" for role, content in accepted)
    raise ConfigError(f"{at} must have {keys}, both text; found {_shortened(message)}")


def _check_role(name: str, position: int, at: str) -> None:
    if name not in ROLES:
        raise ConfigError(f"{at}: unknown role {name!r}; expected one of {', '.join(ROLES)}")
    if ROLES[name] == "system" and position > 0:
        raise ConfigError(f"{at}: a system message must be the first one")


def _shortened(value: Any, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "…"
