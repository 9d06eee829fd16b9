"""`vllm-redrafter trace`: an answer and its drafts, written as a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import shape_of
from vllm_redrafter.checkpoints.shipped import shipped_drafter
from vllm_redrafter.cli.demo.given import check_sizes
from vllm_redrafter.cli.demo.smollm2 import NAME
from vllm_redrafter.cli.trace.page import page
from vllm_redrafter.cli.trace.records import page_records
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.processor import fast_dtype

SPEC_TOKENS = 12
"""Where the checkpoint records no shape."""


def trace(target: Path, drafter: Path | None, prompt: str, max_tokens: int, html: Path) -> int:
    """Answer a prompt greedily and write its page.

    Returns:
        How many steps the answer took.

    Raises:
        ConfigError: target and drafter do not fit, or the page cannot be written there.
    """
    if not html.expanduser().resolve().parent.is_dir():
        raise ConfigError(f"--html {str(html)!r}: no such folder; make it, or name another")
    if html.expanduser().is_dir():
        raise ConfigError(f"--html {str(html)!r} is a folder; name a file in it")
    if not prompt.strip():
        raise ConfigError(f"--prompt {prompt!r} has no text; give a question of at least one word")
    folder = target.expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"TARGET {str(folder)!r}: no config.json there; give the folder of a model in Hugging "
            "Face format"
        )
    draft = _drafter(folder, drafter)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_redrafter.engine.cpu.recording import record_answer, start_recordable

    shape = {"num_speculative_tokens": SPEC_TOKENS, **shape_of(read_config(str(draft)))}
    dtype = str(fast_dtype()).removeprefix("torch.")
    llm = start_recordable(str(folder), {**shape, "model": str(draft)}, dtype)
    tokenizer = llm.get_tokenizer()
    answer, steps = record_answer(llm, prompt_tokens(tokenizer, prompt), max_tokens)
    llm.llm_engine.engine_core.shutdown()
    records = page_records(prompt, answer, steps, tokenizer.decode)
    html.expanduser().write_text(page(records), encoding="utf-8")
    return len(records["steps"])


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """By the target's chat template, where it has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _drafter(target: Path, drafter: Path | None) -> Path:
    """The given one, or the one that comes with the package; absolute."""
    found = drafter or shipped_drafter(NAME)
    name = f"--drafter {str(found)!r}" if drafter else f"the shipped drafter {NAME!r}"
    check_sizes(target, found, name, "give a --drafter that was trained for this target")
    return found.expanduser().resolve()
