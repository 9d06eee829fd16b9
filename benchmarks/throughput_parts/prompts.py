# SPDX-License-Identifier: Apache-2.0
"""Prompts by task: those of a dataset file, and the token ids that every engine is given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from throughput_parts.methods import InputError
from vllm_redrafter.data.chat_template import ChatTemplate
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

Message: TypeAlias = dict[str, str]
Prompt: TypeAlias = str | list[Message]
"""Text, or the opening of a conversation: its messages up to the user's first."""

ByTask: TypeAlias = dict[str | None, list[Prompt]]
"""Prompts by what they ask for; None is the only key where nothing says it."""

TokensByTask: TypeAlias = dict[str | None, list[list[int]]]
"""The same, as token ids."""


def read_dataset(path: Path) -> tuple[ByTask, LeftOut]:
    """The prompts of a dataset file, each a conversation's first turn; and what was left out.

    If the first row of use has a `category` that is text, as in MT-Bench, that is a row's task.

    Raises:
        InputError: see `read_prompts`; or a row lacks a category that the first one has.
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
            found.setdefault(category, []).append(_prompt(opening))
    except ConfigError as error:
        raise InputError(f"--dataset {error}") from error
    return found, left_out


def _category(row: Any) -> str | None:
    category = row.get("category") if isinstance(row, dict) else None
    is_text = isinstance(category, str) and category.strip() and not unpaired_surrogate(category)
    return category if is_text else None


def _prompt(opening: Conversation) -> Prompt:
    turn = opening.turns[0]
    if opening.bare:
        return turn
    system = [] if opening.system is None else [{"role": "system", "content": opening.system}]
    return [*system, {"role": "user", "content": turn}]


def tokenize(
    prompts: Sequence[Prompt], tokenizer: Any, embedded: EmbeddedTokens, chat: bool | None
) -> tuple[list[list[int]], LeftOut]:
    """Token ids of each prompt, and what the target cannot be asked.

    Args:
        prompts: text or messages.
        tokenizer: the target's, from transformers.
        embedded: the tokens that the target can be sent.
        chat: put prompts through the target's chat template; None does so for conversations,
            where the target has a template.

    Raises:
        InputError: `chat` with a target that has no chat template, or nothing can be asked.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise InputError(
            "--chat: the target's tokenizer has no chat template; --no-chat asks in bare text"
        )
    rows, left_out = [], LeftOut()
    template = ChatTemplate(tokenizer) if has_template else None
    for number, prompt in enumerate(prompts, start=1):
        at = f"prompt {number}"
        try:
            if template and (chat or (chat is None and not isinstance(prompt, str))):
                text = _by_template(prompt, template, at)
                tokens = tokenizer.encode(text, add_special_tokens=False)
            else:
                text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                tokens = tokenizer.encode(text)
            if trouble := embedded.trouble(tokens):
                raise UnusableRow(at, "with a token that has no embedding", trouble)
        except UnusableRow as error:
            left_out.add(error)
        else:
            rows.append(tokens)
    if not rows:
        raise InputError(f"the target can be asked none of the prompts: {left_out.reasons()[0]}")
    return rows, left_out


def _by_template(prompt: Prompt, template: ChatTemplate, at: str) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return str(template.apply(messages))
    except ConfigError as error:
        raise UnusableRow(at, "that the target's chat template refuses", str(error)) from error


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
