# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter trace`: an answer and its drafts, written as a page that needs no network."""

import json
import os
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from vllm_redrafter.cli.demo.smollm2 import pair_of, prompts_of
from vllm_redrafter.drafting.recorder import RecordedStep
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import check_writable
from vllm_redrafter.utils.processor import fast_dtype

PLACE = "__TRACE__"
"""Where the template, page.html, wants the data."""


def trace(target: str, drafter: str | None, prompt: str, max_tokens: int, html: Path) -> int:
    """Answer a prompt greedily and write its page; returns how many steps the answer took.

    ConfigError: target, drafter and prompt do not fit, vLLM cannot start, or the page cannot be
    written.
    """
    check_writable(html, "--html")
    if not prompt.strip():
        raise ConfigError(f"--prompt {prompt!r} has no text; give a question of at least one word")
    opened, speculation = pair_of(target, drafter)
    [tokens] = prompts_of(opened, [prompt])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_redrafter.engine.cpu.recording import record_answer, start_recordable

    dtype = str(fast_dtype()).removeprefix("torch.")
    llm = start_recordable(target, speculation, dtype, len(tokens), max_tokens)
    answer, steps = record_answer(llm, tokens, max_tokens)
    llm.llm_engine.engine_core.shutdown()
    records = page_records(prompt, answer, steps, opened.tokenizer.decode)
    try:
        html.expanduser().write_text(page(records), encoding="utf-8")
    except OSError as error:  # the disk filled while the answer was made
        raise ConfigError(f"--html {str(html)!r} cannot be written: {error.strerror}") from error
    return len(records["steps"])


def page_records(
    prompt: str,
    answer: Sequence[int],
    steps: Sequence[RecordedStep],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The page's data, for JSON; the last step may have had more tokens than vLLM returned."""
    records: list[dict[str, Any]] = []
    end = 0
    for step in steps:
        before, end = end, min(end + len(step.output_tokens), len(answer))
        if end == before:
            break
        nodes = [
            {
                "text": decode([node.token]),
                "parent": node.parent,
                "depth": node.depth,
                "probability": None if node.probability is None else round(node.probability, 4),
                "match": node.match_length,
                "verified": node.verified,
                "accepted": node.accepted,
            }
            for node in step.nodes
        ]
        records.append(
            {
                "tokens": end - before,
                "milliseconds": round(1e3 * step.seconds, 3),
                "before": decode(list(answer[:before])),
                "text": decode(list(answer[:end])),
                "nodes": nodes,
            }
        )
    return {"prompt": prompt, "steps": records}


def page(records: dict[str, Any]) -> str:
    """The page as HTML; no token can end the script that holds the data."""
    data = json.dumps(records)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = (files("vllm_redrafter.cli.trace") / "page.html").read_text(encoding="utf-8")
    return template.replace(PLACE, data)
