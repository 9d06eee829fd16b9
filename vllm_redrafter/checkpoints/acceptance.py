# SPDX-License-Identifier: Apache-2.0
"""A drafter's measured acceptance, `acceptance` in config.json: a server's first estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from vllm_redrafter.utils.errors import ConfigError

ENTRY = "acceptance"


@dataclass(frozen=True)
class AcceptanceRecord:
    """Of greedy requests, or of sampled ones.

    Attributes:
        slope, biases: the calibration (`budget/acceptance.py`), the latter of depths 1 to L.
        survival: [L][W], probabilities of acceptance, by level and rank within it.
    """

    slope: float
    biases: tuple[float, ...]
    survival: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slope) and self.slope >= 0):
            raise ConfigError(f"slope must be a number of at least 0, got {self.slope}")
        if not self.biases or not all(map(math.isfinite, self.biases)):
            raise ConfigError(f"biases must be numbers, one for each depth, got {self.biases}")
        widths = {len(level) for level in self.survival}
        if len(self.survival) != len(self.biases) or len(widths) != 1 or 0 in widths:
            raise ConfigError(f"survival must have {len(self.biases)} levels of the same width")
        if not all(0 <= p <= 1 for level in self.survival for p in level):
            raise ConfigError("survival must hold probabilities, from 0 to 1")


class PerSampling(NamedTuple):
    """By kind of request; None where nothing was measured."""

    greedy: AcceptanceRecord | None = None
    sampled: AcceptanceRecord | None = None

    def with_fallback(self) -> PerSampling:
        """The record of one kind alone stands for the other, too."""
        return PerSampling(self.greedy or self.sampled, self.sampled or self.greedy)


NOTHING_RECORDED = PerSampling()


def acceptance_of(config: Mapping[str, Any]) -> PerSampling:
    """Read a config.json; a ConfigError names a broken entry."""
    entry = config.get(ENTRY, {})
    if not isinstance(entry, Mapping) or not entry.keys() <= {*PerSampling._fields}:
        raise _broken(
            ENTRY, f"expected entries of {' and '.join(PerSampling._fields)}, got {entry!r}"
        )
    return PerSampling(
        **{kind: _record(f"{ENTRY}.{kind}", values) for kind, values in entry.items()}
    )


def acceptance_entry(measured: PerSampling) -> dict[str, Any]:
    """The entry of config.json; empty where nothing was measured."""
    known = {kind: asdict(record) for kind, record in measured._asdict().items() if record}
    return {ENTRY: known} if known else {}


def _record(where: str, values: Any) -> AcceptanceRecord:
    try:
        slope, biases, survival = values["slope"], values["biases"], values["survival"]
        return AcceptanceRecord(float(slope), _floats(biases), tuple(map(_floats, survival)))
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise _broken(where, str(error)) from error


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _broken(where: str, reason: str) -> ConfigError:
    return ConfigError(
        f"config.json, {where}: {reason}; measure it again with `vllm-redrafter evaluate "
        "--record`, or delete the entry"
    )
