"""What the CPU engine's index costs: a step, a prompt, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cpu_parts import timing
from rich.table import Table

from context_matches_parts.texts import VOCAB_SIZE, Kind, texts
from vllm_redrafter.tree.context_index import ContextIndex

STEP_TOKENS = 3
"""What a step's verification yields."""
PROMPT_REPEATS = 3


@dataclass(frozen=True)
class IndexCost:
    """Of texts of one kind and length; times are medians.

    Attributes:
        text: the kind.
        tokens: of each request.
        requests: in the batch.
        step: microseconds, to enter STEP_TOKENS tokens of each request and to find its matches.
        prompt: microseconds for each request, to forget another text and enter its own.
        bytes: of the index, for each request.
    """

    text: Kind
    tokens: int
    requests: int
    step: float
    prompt: float
    bytes: int


def measure(
    kind: Kind, tokens: int, requests: int, paths: int, path_length: int, repeats: int
) -> IndexCost:
    """Time one size."""
    table = texts(kind, requests, tokens + STEP_TOKENS * (repeats + 1))
    names, rows = [str(row) for row in range(requests)], np.arange(requests)
    lengths = np.full(requests, tokens)
    index = ContextIndex(requests, paths, path_length, VOCAB_SIZE)

    def prompt() -> None:
        for name in names:
            index.forget(name)
        index.matches(names, table, rows, lengths)

    def step() -> None:
        nonlocal lengths
        lengths = lengths + STEP_TOKENS
        index.matches(names, table, rows, lengths)

    entered = timing.medians({"prompt": prompt}, PROMPT_REPEATS)["prompt"]
    num_bytes = index.num_bytes // requests
    stepped = timing.medians({"step": step}, repeats)["step"]
    return IndexCost(kind, tokens, requests, 1000 * stepped, 1000 * entered / requests, num_bytes)


def table(costs: Sequence[IndexCost]) -> Table:
    """The figures, for a person."""
    made = Table("text", title="The CPU engine's index of texts")
    for column in ("tokens", "requests", "step, µs", "prompt, µs/request", "KB/request"):
        made.add_column(column, justify="right")
    for cost in costs:
        made.add_row(
            cost.text,
            f"{cost.tokens:,}",
            str(cost.requests),
            f"{cost.step:.0f}",
            f"{cost.prompt:,.0f}",
            f"{cost.bytes / 1000:,.0f}",
        )
    return made
