"""A row of a dataset, for whoever makes rows and does not read or write files."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """A sequence of T tokens; `dataset.py` describes the columns."""

    conversation: int
    input_ids: list[int]
    assistant_mask: list[bool]
    top_tokens: list[list[int]] = field(default_factory=list)
    top_log_probs: list[list[float]] = field(default_factory=list)
