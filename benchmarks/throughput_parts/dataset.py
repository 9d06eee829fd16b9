"""A dataset file's prompts by task: MT-Bench's and GSM8K's as they are, and those of other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from throughput_parts.methods import InputError
from throughput_parts.prompts import ByTask, Prompt
from vllm_redrafter.data.left_out import LeftOut
from vllm_redrafter.data.prompts import READERS, Conversation, read_openings
from vllm_redrafter.data.text_checks import half_character
from vllm_redrafter.utils.errors import ConfigError


def read_dataset(path: Path) -> tuple[ByTask, LeftOut]:
    """The prompts of a dataset file, and what was left out.

    If the first row of use has a `category` that is text, as in MT-Bench, that is a row's task.

    Raises:
        InputError: see `read_openings`; or a row lacks a category that the first one has.
    """
    try:
        openings, left_out = read_openings(path)
        categories = {place: _category(row) for place, row in READERS[path.suffix](path)}
        divided = categories[openings[0].source] is not None
        found: ByTask = {}
        for opening in openings:
            category = categories[opening.source] if divided else None
            if divided and category is None:
                raise ConfigError(
                    f"{opening.source}: no 'category' that is text, which the first row has; give "
                    "every row one, or none"
                )
            found.setdefault(category, []).append(_prompt(opening))
    except ConfigError as error:
        raise InputError(f"--dataset {error}") from error
    return found, left_out


def _category(row: Any) -> str | None:
    category = row.get("category") if isinstance(row, dict) else None
    is_text = isinstance(category, str) and category.strip() and not half_character(category)
    return category if is_text else None


def _prompt(opening: Conversation) -> Prompt:
    (turn,) = opening.turns
    if opening.bare:
        return turn
    system = [] if opening.system is None else [{"role": "system", "content": opening.system}]
    return [*system, {"role": "user", "content": turn}]
