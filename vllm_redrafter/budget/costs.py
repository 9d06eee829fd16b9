"""What a step costs: tables measured at start-up, and how they follow the steps' own times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.json_files import read_json

FORMAT = "vllm-redrafter costs"

Floats = npt.NDArray[np.floating[Any]]


class DraftCost(NamedTuple):
    """Seconds of a draft for so many requests."""

    requests: int
    beam_width: int
    beam_length: int
    seconds: float


class VerifyCost(NamedTuple):
    """Seconds of a step that verifies, or decodes plainly, so many rows."""

    rows: int
    seconds: float


@dataclass(frozen=True)
class CostTable:
    """Measured costs of drafting and of verification, where they were measured.

    Attributes:
        target, drafter, device: what was measured, in words.
        draft: searches of one level and of the longest length for each width; a level costs as
            much as another.
        verify: steps of ascending numbers of rows.

    Raises:
        ConfigError: a table is empty, or an entry is not a positive number.
    """

    target: str
    drafter: str
    device: str
    draft: tuple[DraftCost, ...]
    verify: tuple[VerifyCost, ...]

    def __post_init__(self) -> None:
        if not self.draft or not self.verify:
            raise ConfigError("costs: a table without entries; measure it again")
        for entry in (*self.draft, *self.verify):
            if not all(isinstance(v, int | float) and 0 < v < np.inf for v in entry):
                raise ConfigError(f"costs: {entry} holds a value that is not a positive number")

    def draft_seconds(self, requests: int, beam_width: int, beam_length: int) -> float:
        """D: interpolated over requests and lengths.

        Raises:
            ConfigError: nothing was measured of this width.
        """
        if beam_width not in self._draft_curves:
            widths = ", ".join(map(str, sorted(self._draft_curves)))
            raise ConfigError(
                f"costs: no draft of beam width {beam_width} was measured, only of {widths}"
            )
        curves = self._draft_curves[beam_width]
        lengths = sorted(curves)
        at = [float(curve_at(curves[length], requests)) for length in lengths]
        return float(curve_at((np.array(lengths), np.array(at)), beam_length))

    def verify_seconds(self, rows: npt.ArrayLike) -> Floats:
        """V of any numbers of rows: interpolated, beyond the last entry by the last slope."""
        return curve_at(self._verify_curve, rows)

    @cached_property
    def _draft_curves(self) -> dict[int, dict[int, tuple[Floats, Floats]]]:
        curves: dict[int, dict[int, tuple[Floats, Floats]]] = {}
        for width, length in {entry[1:3] for entry in self.draft}:
            # Whatever searches as much or more.
            no_less = [e for e in self.draft if e.beam_width >= width and e.beam_length >= length]
            curves.setdefault(width, {})[length] = _curve(
                (size, min(e.seconds for e in no_less if e.requests >= size))
                for size, *shape, _ in self.draft
                if shape == [width, length]
            )
        return curves

    @cached_property
    def _verify_curve(self) -> tuple[Floats, Floats]:
        return _curve(self.verify)

    def to_json(self) -> str:
        """The table as a file's text."""
        values: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        values["draft"] = [entry._asdict() for entry in self.draft]
        values["verify"] = [entry._asdict() for entry in self.verify]
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """A table that `to_json` wrote.

        Raises:
            ConfigError: the file cannot be read, or is none.
        """
        try:
            return cls._from_values(read_json(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a table of costs ({error})") from error

    @classmethod
    def _from_values(cls, values: Mapping[str, Any]) -> CostTable:
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}, not {FORMAT!r}")
        return cls(
            target=values["target"],
            drafter=values["drafter"],
            device=values["device"],
            draft=tuple(DraftCost(**entry) for entry in values["draft"]),
            verify=tuple(VerifyCost(**entry) for entry in values["verify"]),
        )


def _curve(points: Iterable[tuple[int, float]]) -> tuple[Floats, Floats]:
    """Ascending sizes, and seconds that never fall: less work does not take more time.

    Disturbances only add to what is measured, so of two times that are out of order the shorter
    one, of the larger size, is believed.
    """
    sizes, seconds = np.array(sorted(points), dtype=np.float64).T
    return sizes, np.minimum.accumulate(seconds[::-1])[::-1]


def curve_at(curve: tuple[Floats, Floats], size: npt.ArrayLike) -> Floats:
    """Linear interpolation; beyond the last point by the last slope, never below 0."""
    sizes, seconds = curve
    at = np.asarray(size, dtype=np.float64)
    values = np.interp(at, sizes, seconds)
    if sizes.shape[0] > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        values = values + np.maximum(at - sizes[-1], 0.0) * max(slope, 0.0)
    return np.asarray(values)
