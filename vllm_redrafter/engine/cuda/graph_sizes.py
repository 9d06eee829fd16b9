# SPDX-License-Identifier: Apache-2.0
"""Of which sizes CUDA graphs of decoding steps are wanted: arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """The batches whose requests get the same number of draft tokens.

    Attributes:
        rows: per request, the root counted.
        fewest: requests of the smallest such batch.
        most: of the largest.
    """

    rows: int
    fewest: int
    most: int


def tiers(nodes: Sequence[int]) -> list[Tier]:
    """The tiers of a schedule of K.

    Args:
        nodes: K for batches of 1, 2, ... requests.
    """
    batches: dict[int, list[int]] = {}
    for requests, k in enumerate(nodes, start=1):
        batches.setdefault(k, []).append(requests)
    return [Tier(k + 1, found[0], found[-1]) for k, found in batches.items()]


def sizes_beyond(covered: int, most: int, unit: int) -> list[int]:
    """Sizes above `covered` that pad no batch up to `most` rows by more than an eighth of it, or
    by a unit. So there are six of them, or fewer, each time the size doubles.

    Args:
        covered: the rows up to which there are graphs.
        most: rows of the largest batch.
        unit: what a size is a multiple of, a request's rows.

    Returns:
        Ascending; the last is the largest multiple within `most`. None where that is covered.
    """
    sizes, largest = [], most // unit * unit
    size = covered // unit * unit
    while size < largest:
        size = min(max(size + unit, size * 9 // 8 // unit * unit), largest)
        sizes.append(size)
    return sizes
