# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter trace`: answers and their drafts, written as a page that needs no network."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_redrafter.cli.installed import versions
from vllm_redrafter.cli.quiet import quiet
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import check_writable, writing

if TYPE_CHECKING:
    from vllm_redrafter.drafting.recorder import RecordedStep

PLACE = "__TRACE__"
"""Where the template, page.html, wants the data."""
WARM_UP_TOKENS = 32
"""Before the answers, which find everything compiled; and, without drafts, after them."""


def trace(
    target: str,
    drafter: str | None,
    prompts: Sequence[str],
    max_tokens: int,
    html: Path,
    sampling: tuple[float, int] = (0.0, 0),
) -> None:
    """Answer prompts, by temperature and seed, and write their page.

    ConfigError: target, drafter and prompts do not fit, vLLM cannot start, or the page cannot be
    written.
    """
    check_writable(html, "--html")
    if empty := [prompt for prompt in prompts if not prompt.strip()]:
        raise ConfigError(f"--prompt {empty[0]!r} has no text; give a question of a word or more")
    typer.echo(f"loading {target}")
    from vllm_redrafter.cli.demo.smollm2 import pair_of, prompts_of
    from vllm_redrafter.utils.processor import fast_dtype

    opened, speculation = pair_of(target, drafter)
    contexts = prompts_of(opened, prompts)
    dtype = str(fast_dtype()).removeprefix("torch.")
    how = "temperature {}, seed {}".format(*sampling) if sampling[0] else "greedy"
    facts = {
        "target": _shown(target),
        "drafter": _shown(drafter or speculation["model"]),
        "K": str(speculation["num_speculative_tokens"]),
        "decoding": f"{how}, {dtype}",
        "processor": _processor(),
        **{name: version for name, version in versions().items() if "vllm" in name},
        "date": f"{date.today()}",
    }
    answers: list[dict[str, Any]] = []
    with quiet():
        from vllm_redrafter.engine.cpu.recording import record_answer, start_recordable

        llm = start_recordable(target, speculation, dtype, max(map(len, contexts)), max_tokens)
        short = contexts[0], min(max_tokens, WARM_UP_TOKENS), sampling
        record_answer(llm, *short)
        for prompt, context in zip(prompts, contexts, strict=True):
            typer.echo(f"decoding answer {len(answers) + 1} of {len(prompts)}")
            recorded = record_answer(llm, context, max_tokens, sampling)
            answers.append(answer_data(prompt, *recorded, opened.tokenizer.decode))
        _, plain = record_answer(llm, *short, drafts=False)
        llm.llm_engine.engine_core.shutdown()
    with writing(f"--html {str(html)!r}", "name another file"):  # the disk may be full by now
        html.expanduser().write_text(page(facts, plain, answers), encoding="utf-8")
    steps = [step for answer in answers for step in answer["steps"]]
    tokens = sum(step["tokens"] for step in steps)
    typer.echo(f"wrote {html}: {tokens} tokens in {len(steps)} steps")


def _shown(model: str) -> str:
    """Who sees the page needs no path of this machine."""
    return Path(model).name if Path(model).expanduser().is_dir() else model


def _processor() -> str:
    """Its name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text() if info.exists() else "")
    return found[1] if found else platform.machine()


def answer_data(
    prompt: str,
    answer: Sequence[list[int]],
    steps: Sequence[RecordedStep],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """An answer for the page; the last step may have had more tokens than vLLM returned."""
    data: list[dict[str, Any]] = []
    before, text = list[int](), ""
    for tokens, step in zip(answer, steps, strict=True):
        accepted = tokens[: len(step.output_tokens) - 1]
        # A character of which bytes are missing is shown with the token that has the last one.
        drafted = decode(before + accepted).rstrip("\ufffd")[len(text) :]
        before += tokens
        own = decode(before).rstrip("\ufffd")[len(text + drafted) :]
        text += drafted + own
        nodes = [asdict(node) | {"text": decode([node.token])} for node in step.nodes]
        texts = {"drafted": drafted, "own": own, "target": decode(step.output_tokens[-1:])}
        data.append(asdict(step) | {"nodes": nodes, "tokens": len(tokens)} | texts)
    return {"prompt": prompt, "steps": data}


def page(
    facts: dict[str, str], plain: Sequence[RecordedStep], answers: Sequence[dict[str, Any]]
) -> str:
    """The page as HTML: what ran, steps without drafts, `answer_data`.

    No token can end the script that holds the data.
    """
    plain_seconds = [step.seconds for step in plain[1:]]  # the first one is a prompt's
    data = json.dumps({"facts": facts, "plain_seconds": plain_seconds, "answers": answers})
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = (files("vllm_redrafter.cli.trace") / "page.html").read_text(encoding="utf-8")
    return template.replace(PLACE, data)
