"""A dataset file's prompts by task: MT-Bench's and GSM8K's as they are, and those of other rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from throughput_parts.methods import InputError
from throughput_parts.prompts import ByTask, Prompt
from vllm_redrafter.data.prompts import READERS, Conversation, read_openings
from vllm_redrafter.errors import ConfigError

OPENING_KEYS = ("messages", "conversations", "turns", "prompt", "text")
"""Where `read_openings` finds prompts; beside one of them a `question` is not read."""


def read_dataset(path: Path) -> tuple[ByTask, int]:
    """The prompts of a dataset file, and how many conversations were left out.

    If the first row has a `category` that is text, as in MT-Bench, a row's category is its task.
    Beside the rows that `read_openings` takes, those with a `question`, as in GSM8K, are read as a
    user's turn; answers are not read.

    Raises:
        InputError: see `read_openings`; or a row lacks what the first one has.
    """
    try:
        first = _first_row(path)
        has_questions = "question" in first and first.keys().isdisjoint(OPENING_KEYS)
        openings, left_out = (_questions(path), 0) if has_questions else read_openings(path)
        if _category(first) is None:
            return {None: [_prompt(opening) for opening in openings]}, left_out
        return _by_category(path, openings), left_out
    except ConfigError as error:
        raise InputError(f"--dataset {error}") from error


def _first_row(path: Path) -> dict[str, Any]:
    """Empty where there is none: `read_openings` says what is wrong with such a file."""
    if not path.is_file() or path.suffix not in READERS:
        return {}
    _, row = next(READERS[path.suffix](path), ("", None))
    return row if isinstance(row, dict) else {}


def _questions(path: Path) -> list[Conversation]:
    found = []
    for at, row in READERS[path.suffix](path):
        question = row.get("question") if isinstance(row, dict) else None
        if not isinstance(question, str):
            raise ConfigError(
                f'{at}: found {row!r:.80}; expected {{"question": "..."}}, as in the first row'
            )
        found.append(Conversation((question,), source=at))
    return found


def _by_category(path: Path, openings: Sequence[Conversation]) -> ByTask:
    categories = {at: _category(row) for at, row in READERS[path.suffix](path)}
    found: ByTask = {}
    for opening in openings:
        category = categories.get(opening.source)
        if category is None:
            raise ConfigError(
                f"{opening.source}: no 'category' that is text, which the first row has; give "
                "every row one, or none"
            )
        found.setdefault(category, []).append(_prompt(opening))
    return found


def _category(row: Any) -> str | None:
    category = row.get("category") if isinstance(row, dict) else None
    return category if isinstance(category, str) and category.strip() else None


def _prompt(opening: Conversation) -> Prompt:
    (turn,) = opening.turns
    if opening.bare:
        return turn
    system = [] if opening.system is None else [{"role": "system", "content": opening.system}]
    return [*system, {"role": "user", "content": turn}]
