"""From the usual choice to a faster one, in steps. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any, Generic, TypeVar

from shared_parts.timing import Timing

from tree_attention_parts.report import Cell, Missing

GAIN = 0.98
"""Only what takes less than this share of the usual choice's time is better: the rest is noise."""

C = TypeVar("C")
Times = dict[str, dict[C, Cell]]
"""By case, each candidate's."""


@dataclass
class Search(Generic[C]):
    """For the fastest of a kind: from the usual choice to its neighbours, and on from the fastest.

    Attributes:
        usual: what is chosen without a table; a dataclass, as all candidates.
        check: what is wrong with a candidate, if anything; asked before it is timed.
        confirm: likewise; asked before it is chosen.
        measure: candidates' times, by case.
        tried: all candidates so far.
        failed: what was wrong with some of them.
        times: of the others.
    """

    usual: C
    check: Callable[[C], str | None]
    confirm: Callable[[C], str | None]
    measure: Callable[[Sequence[C]], Times[C]]
    tried: set[C] = field(default_factory=set)
    failed: dict[C, str] = field(default_factory=dict)
    times: Times[C] = field(default_factory=dict)

    def run(self, neighbours: Callable[[C], Iterable[C]], rounds: int) -> C | None:
        """The fastest; the usual choice where none is clearly faster; None if nothing was timed."""
        self._try([self.usual])
        centre = self.usual
        for _ in range(rounds):
            self._try([c for c in neighbours(centre) if c not in self.tried])
            means = self.means()
            fastest = min(means, key=means.__getitem__, default=centre)
            if fastest == centre:
                break
            centre = fastest
        return self._chosen()

    def means(self) -> dict[C, float]:
        """Geometric means over all cases, in microseconds, of candidates that ran in all."""
        found = {}
        for candidate in self.tried - self.failed.keys():
            cells = [cells.get(candidate) for cells in self.times.values()]
            medians = [cell.median for cell in cells if isinstance(cell, Timing)]
            if medians and len(medians) == len(cells):
                found[candidate] = geometric_mean(medians)
        return found

    def _try(self, candidates: Sequence[C]) -> None:
        problems = {candidate: self.check(candidate) for candidate in candidates}
        self.tried |= problems.keys()
        self.failed |= {c: problem for c, problem in problems.items() if problem is not None}
        for case, cells in self.measure([c for c in problems if problems[c] is None]).items():
            self.times.setdefault(case, {}).update(cells)
            self.failed |= {
                c: cell.reason for c, cell in cells.items() if isinstance(cell, Missing)
            }

    def _chosen(self) -> C | None:
        means = self.means()
        enough = GAIN * means.get(self.usual, float("inf"))
        for candidate in sorted(means, key=means.__getitem__):
            if candidate == self.usual or means[candidate] > enough:
                break
            problem = self.confirm(candidate)
            if problem is None:
                return candidate
            self.failed[candidate] = problem
        return self.usual if self.usual in means else None

    def as_json(self, chosen: C) -> dict[str, Any]:
        """The chosen one's times beside the usual one's, and what failed."""

        def time(cells: dict[C, Cell], candidate: C) -> float | None:
            cell = cells.get(candidate)
            return cell.median if isinstance(cell, Timing) else None

        means = self.means()
        return {
            "usual": asdict(self.usual),
            "microseconds": means[chosen],
            "usual_microseconds": means.get(self.usual),
            "cases": [
                {
                    "case": case,
                    "microseconds": time(cells, chosen),
                    "usual_microseconds": time(cells, self.usual),
                }
                for case, cells in self.times.items()
            ],
            "tried": len(self.tried),
            "failed": [{**asdict(c), "reason": reason} for c, reason in self.failed.items()],
        }

    def said(self, chosen: C | None) -> str:
        """The same in a line."""
        if chosen is None:
            reasons = "; ".join(dict.fromkeys(self.failed.values()))
            return f"not timed: {reasons or 'no case fits into memory'}"
        means = self.means()
        usual = means.get(self.usual)
        beside = "the usual choice failed" if usual is None else f"usually {usual:.1f} µs"
        numbers = ", ".join(f"{name} {value}" for name, value in asdict(chosen).items())
        return f"{means[chosen]:.1f} µs ({beside}): {numbers}"
