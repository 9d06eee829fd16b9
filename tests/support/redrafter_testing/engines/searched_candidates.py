# SPDX-License-Identifier: Apache-2.0
"""How many candidates the drafts of a CPU engine chose from."""

from typing import Any

COUNTS: set[int] = set()
"""In the engine's process."""


def record() -> None:
    """For `setup`: searches say how many they choose from."""
    from vllm_redrafter.engine.cpu import proposer

    search = proposer.search

    def recorded(*given: Any) -> Any:
        COUNTS.add(given[-1])
        return search(*given)

    proposer.search = recorded


def recorded(worker: Any) -> set[int]:
    return COUNTS
