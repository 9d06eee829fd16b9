"""What a step costs, by the table that an engine measured on its machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_redrafter.budget.costs import CostTable
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import search_shape
from vllm_redrafter.utils.errors import ConfigError


@dataclass(frozen=True)
class MeasuredCosts:
    """The costs of steps with a number of requests, in units of a plain step with as many.

    Attributes:
        table: what was measured.
        requests: N.
    """

    table: CostTable
    requests: int

    def of(self, shape: ReDrafterConfig) -> float:
        """A step of this shape: (D(N) + V(N (1 + K))) / V(N)."""
        search = search_shape(shape, shape.num_speculative_tokens)
        draft = self.table.draft_seconds(self.requests, *search)
        plain, verify = self.table.verify_seconds([self.requests, self._rows(shape)])
        return (draft + float(verify)) / float(plain)

    def check(self, shapes: Iterable[ReDrafterConfig]) -> None:
        """See to it that no cost has to be guessed.

        Raises:
            ConfigError: the table ends before a shape, or before so many requests.
        """
        table = self.table
        most_rows = max(entry.rows for entry in table.verify)
        for shape in shapes:
            width, length = search_shape(shape, shape.num_speculative_tokens)
            measured = [entry for entry in table.draft if entry.beam_width == width]
            if not measured:
                _refuse(
                    f"no draft of beam width {width}",
                    f"only of {', '.join(map(str, widths_of(table)))}: choose among these with "
                    "--beam-widths",
                    f"a beam_width of {width}",
                )
            longest = max(entry.beam_length for entry in measured)
            if length > longest:
                _refuse(
                    f"no draft of beam length {length}",
                    f"only up to {longest}: choose --beam-lengths of at most that",
                    f"a beam_length of {length}",
                )
            requests = max(entry.requests for entry in measured)
            if self.requests > requests:
                _refuse(
                    f"no draft for {self.requests} requests",
                    f"only for up to {requests}: choose --requests of at most that",
                    f"a max_num_seqs of {self.requests}",
                )
            if self._rows(shape) > most_rows:
                _refuse(
                    f"no step of {self._rows(shape)} rows ({self.requests} requests with "
                    f"{shape.num_speculative_tokens} nodes each)",
                    f"only up to {most_rows}: choose fewer --requests or --spec-tokens",
                    "larger max_num_seqs and num_speculative_tokens",
                )

    def facts(self) -> dict[str, Any]:
        """For a file of figures."""
        table = self.table
        return {
            "measured_on": table.device,
            "target": table.target,
            "drafter": table.drafter,
            "requests": self.requests,
        }

    def __str__(self) -> str:
        many = "1 request" if self.requests == 1 else f"{self.requests} requests at once"
        return f"By the costs that an engine measured ({self.table.device}), with {many}"

    def _rows(self, shape: ReDrafterConfig) -> int:
        return self.requests * (1 + shape.num_speculative_tokens)


def read_costs(path: Path) -> CostTable:
    """The table in a file.

    Raises:
        ConfigError: the file is none.
    """
    try:
        return CostTable.read(path)
    except ConfigError as error:
        raise ConfigError(
            f"--costs {error}; give a file that an engine's costs were written to"
        ) from error


def widths_of(table: CostTable) -> list[int]:
    """The beam widths that were measured."""
    return sorted({entry.beam_width for entry in table.draft})


def _refuse(lacks: str, has: str, remedy: str) -> None:
    raise ConfigError(
        f"--costs: {lacks} was measured, {has}, or measure again with an engine that has {remedy}"
    )
