# SPDX-License-Identifier: Apache-2.0
"""A row of a dataset, for whoever makes rows and does not read or write files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A sequence of T tokens; `dataset.py` describes the columns."""

    conversation: int
    input_ids: list[int]
    assistant_mask: list[bool]
