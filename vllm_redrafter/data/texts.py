"""Prompts for a base model: pieces of text files, which it will go on with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm_redrafter.data.fingerprint import digest, tokenizer_fingerprint
from vllm_redrafter.data.generation_settings import PromptSettings
from vllm_redrafter.data.own_prompts import PATIENCE, PromptSummary
from vllm_redrafter.data.prompt_file import PromptFile
from vllm_redrafter.data.target_files import load_from
from vllm_redrafter.data.turns import answer_seed
from vllm_redrafter.utils.errors import ConfigError

OF_THE_ENGINE = (
    "temperature",
    "top_p",
    "max_model_len",
    "dtype",
    "in_flight",
    "enforce_eager",
    "tensor_parallel_size",
    "engine_args",
)
"""Settings that mean nothing here, where no engine runs."""
LEAST_TOKENS = 8
"""Of a piece: less says little of what is to follow."""


def cut_prompts(
    target: str,
    texts: Sequence[Path],
    output: Path,
    settings: PromptSettings | None = None,
) -> PromptSummary:
    """Cut text files into prompts, each of which begins with a line.

    Args:
        target: whose tokenizer counts: a folder, or a hub id.
        texts: files in UTF-8.
        output: the file: JSON lines, each with `prompt` and the number of the attempt.
        settings: how many, how long, and the seed; None for the defaults.

    Raises:
        ConfigError: a file cannot be read, or has no text; the files do not have so many pieces.
    """
    settings = settings or PromptSettings()
    if settings.system_prompt is not None:
        raise ConfigError("--system-prompt is for prompts that the target writes, not for --text")
    if settings.max_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"--max-tokens {settings.max_tokens}: a piece of text has at least {LEAST_TOKENS}"
        )
    tokenizer = load_from(AutoTokenizer, target)
    contents = [_read(path) for path in texts]
    made_with = {
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "texts_fingerprint": digest(contents),
        **settings.recipe(),
    }
    with PromptFile(output, made_with) as file:
        summary = PromptSummary(found=len(file))
        last_new = file.next_attempt
        for attempt, piece in _pieces(contents, tokenizer, settings, file.next_attempt):
            if len(file) == settings.num:
                break
            if len(piece) < settings.min_characters:
                summary.short += 1
            elif not file.add({"prompt": piece}, piece, attempt):
                summary.repeated += 1
            else:
                summary.prompts, last_new = summary.prompts + 1, attempt
            if attempt - last_new >= PATIENCE:
                raise ConfigError(
                    f"the files have no more new pieces; {len(file)} are in {output}: lower "
                    "--num, or give more text"
                )
    return summary


def _read(path: Path) -> str:
    try:
        content = path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text {path}: not readable as text in UTF-8: {error}") from error
    if not content.strip():
        raise ConfigError(f"--text {path}: has no text")
    return content


def _pieces(
    contents: Sequence[str], tokenizer: Any, settings: PromptSettings, first: int
) -> Iterator[tuple[int, str]]:
    """(attempt, piece) without end: a random line, and a random number of tokens from there."""
    lines = [(text, start) for text in contents for start in _line_starts(text)]
    attempt = first
    while True:
        chance = random.Random(answer_seed(settings.seed, attempt, 0))
        text, start = chance.choice(lines)
        tokens = chance.randint(LEAST_TOKENS, settings.max_tokens)
        # No token stands for less than a character of the alphabets that tokenizers are made for,
        # and few for more than 16: enough text, and not all of a long file.
        encoded = tokenizer(text[start : start + 16 * tokens], add_special_tokens=False)
        yield attempt, tokenizer.decode(encoded["input_ids"][:tokens]).rstrip()
        attempt += 1


def _line_starts(text: str) -> Iterator[int]:
    """Where lines begin that are not blank."""
    start = 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            yield start
        start += len(line)
