# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter trace`: an answer and its drafts, written as a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.checkpoints.shipped import shipped_drafter
from vllm_redrafter.cli.demo.given import check_sizes
from vllm_redrafter.cli.demo.smollm2 import NAME
from vllm_redrafter.cli.trace.page import page
from vllm_redrafter.cli.trace.records import page_records
from vllm_redrafter.data.chat_template import ChatTemplate
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import check_writable
from vllm_redrafter.utils.processor import fast_dtype

SPEC_TOKENS = 12
"""Where the checkpoint records no shape."""


def trace(target: str, drafter: str | None, prompt: str, max_tokens: int, html: Path) -> int:
    """Answer a prompt greedily and write its page.

    Args:
        target: a folder, or a hub id.
        drafter: of the target, likewise; None for the one that comes with the package.
        prompt: the question.
        max_tokens: of the answer.
        html: the page.

    Returns:
        How many steps the answer took.

    Raises:
        ConfigError: target, drafter and prompt do not fit, vLLM cannot start, or the page cannot
            be written.
    """
    check_writable(html, "--html")
    if not prompt.strip():
        raise ConfigError(f"--prompt {prompt!r} has no text; give a question of at least one word")
    draft = _drafter(target, drafter)
    tokenizer = Target.open(target).tokenizer
    tokens = prompt_tokens(tokenizer, prompt)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_redrafter.engine.cpu.recording import record_answer, start_recordable

    shape = {"num_speculative_tokens": SPEC_TOKENS, **Checkpoint.open(draft).shape}
    dtype = str(fast_dtype()).removeprefix("torch.")
    llm = start_recordable(target, {**shape, "model": draft}, dtype, len(tokens), max_tokens)
    answer, steps = record_answer(llm, tokens, max_tokens)
    llm.llm_engine.engine_core.shutdown()
    records = page_records(prompt, answer, steps, tokenizer.decode)
    try:
        html.expanduser().write_text(page(records), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {str(html)!r} cannot be written: {error.strerror}") from error
    return len(records["steps"])


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """By the target's chat template, where it has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    try:
        return list(ChatTemplate(tokenizer).apply(messages, tokenize=True))
    except ConfigError as error:
        raise ConfigError(f"--prompt: {error}; trace a target that takes a message") from error


def _drafter(target: str, drafter: str | None) -> str:
    """The given one, or the one that comes with the package."""
    found = drafter or str(shipped_drafter(NAME))
    name = f"--drafter {found!r}" if drafter else f"the shipped drafter {NAME!r}"
    check_sizes(target, found, name, "give a --drafter that was trained for this target")
    return os.path.expanduser(found)
