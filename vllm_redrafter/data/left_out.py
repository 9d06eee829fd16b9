# SPDX-License-Identifier: Apache-2.0
"""Rows of prompts that cannot be used: left out, counted, and shown once for each reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_redrafter.utils.errors import ConfigError


class UnusableRow(ConfigError):
    """A row that cannot be used, where the others can.

    Args:
        at: where it was read, such as `prompts.jsonl, line 3`.
        kind: what it has in common with rows of the same trouble, as in `rows that are not JSON`.
        detail: what is wrong with this one.
    """

    def __init__(self, at: str, kind: str, detail: str) -> None:
        super().__init__(f"{at}: {detail}")
        self.kind = kind


@dataclass
class LeftOut:
    """The rows that were left out.

    Attributes:
        strict: leave none out; the first one ends the reading.
        kinds: by what is wrong, how many rows, and the first of them.
    """

    strict: bool = False
    kinds: dict[str, tuple[int, UnusableRow]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(number for number, _ in self.kinds.values())

    def add(self, row: UnusableRow) -> None:
        """Count a row.

        Raises:
            UnusableRow: this one, where none may be left out.
        """
        if self.strict:
            raise row
        number, first = self.kinds.get(row.kind, (0, row))
        self.kinds[row.kind] = number + 1, first

    def reasons(self) -> list[str]:
        """A line for each kind, the most frequent one first."""
        return [
            f"rows {kind}: {number}, the first: {first}"
            for kind, (number, first) in sorted(self.kinds.items(), key=lambda k: -k[1][0])
        ]

    def __str__(self) -> str:
        return "\n".join(f"left out: {reason}" for reason in self.reasons())
