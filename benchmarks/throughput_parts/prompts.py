# SPDX-License-Identifier: Apache-2.0
"""Prompts by task: those of a dataset file, and the token ids that every engine is given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_redrafter.data.conversation_rows import (
    Conversation,
    LeftOut,
    UnusableRow,
    unpaired_surrogate,
)
from vllm_redrafter.data.prompts import READERS, read_prompts
from vllm_redrafter.utils.errors import ConfigError

if TYPE_CHECKING:  # it imports transformers
    from vllm_redrafter.data.target import EmbeddedTokens

SUITES = Path(__file__).parents[1] / "suites.jsonl"
"""What people ask of a small chat model, by task."""
STREAMS = SUITES.with_name("streams.jsonl")
"""What one server is asked all day, by template: one task after the other."""

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How SPEED-Bench's rows begin whose texts its preparation has to fetch."""

ByTask: TypeAlias = dict[str | None, list[Conversation]]
"""Prompts by what they ask for; None is the only key where nothing says it."""

TokensByTask: TypeAlias = dict[str | None, list[list[int]]]
"""The same, as token ids."""


def read_dataset(path: Path) -> tuple[ByTask, LeftOut]:
    """The prompts of a dataset file, each a conversation's first turn; and what was left out.

    If the first row of use has a `category` that is text, as in MT-Bench, that is a row's task.

    Raises:
        ConfigError: see `read_prompts`; or a row lacks a category that the first one has, or has
            SPEED-Bench's placeholder for its text.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        openings, left_out = read_prompts(str(path))
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
            if opening.turns[0].startswith(PLACEHOLDER):
                raise ConfigError(
                    f"{opening.source}: a placeholder, {opening.turns[0][:24]!r}…; prepare "
                    "SPEED-Bench by NVIDIA's script, which fetches the prompts"
                )
            found.setdefault(category, []).append(replace(opening, turns=opening.turns[:1]))
    except ConfigError as error:
        raise ConfigError(f"--dataset {error}") from error
    return found, left_out


def _category(row: Any) -> str | None:
    category = row.get("category") if isinstance(row, dict) else None
    is_text = isinstance(category, str) and category.strip() and not unpaired_surrogate(category)
    return category if is_text else None


def tokenize(
    prompts: Sequence[Conversation], tokenizer: Any, embedded: EmbeddedTokens, chat: bool | None
) -> tuple[list[list[int]], LeftOut]:
    """Token ids of each prompt, and what the target cannot be asked.

    Args:
        prompts: of one turn each.
        tokenizer: the target's, from transformers.
        embedded: the tokens that the target can be sent.
        chat: put prompts through the target's chat template; None does so for conversations,
            where the target has a template.

    Raises:
        ConfigError: `chat` with a target that has no chat template, or nothing can be asked.
    """
    from vllm_redrafter.data.turns import PromptRenderer

    if chat and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "--chat: the target's tokenizer has no chat template; --no-chat asks in bare text"
        )
    without = copy(tokenizer)
    without.chat_template = None
    by_template, bare = PromptRenderer(tokenizer, embedded), PromptRenderer(without, embedded)
    rows, left_out = [], LeftOut()
    for prompt in prompts:
        renderer = by_template if chat or (chat is None and not prompt.bare) else bare
        try:
            rows.append(renderer.prompt(prompt, []))
        except UnusableRow as error:
            left_out.add(error)
    if not rows:
        raise ConfigError(f"the target can be asked none of the prompts: {left_out.reasons()[0]}")
    return rows, left_out


def choose(
    prompts: Sequence[list[int]], count: int, longest: int | None, seed: int | None
) -> list[list[int]]:
    """Up to `count` prompts; where there are more, they are drawn at random.

    Args:
        prompts: token ids.
        count: how many are wanted.
        longest: the most tokens in a prompt that leaves room for the output; longer ones are
            left out.
        seed: of the draw; None takes the first ones.

    Raises:
        ConfigError: no prompt is short enough.
    """
    fitting = [prompt for prompt in prompts if longest is None or len(prompt) <= longest]
    if not fitting:
        raise ConfigError(
            f"no prompt fits: the shortest has {min(map(len, prompts))} tokens, and only {longest} "
            "leave room for --max-tokens within the target's maximum length"
        )
    if len(fitting) <= count or seed is None:
        return fitting[:count]
    return random.Random(seed).sample(fitting, count)
