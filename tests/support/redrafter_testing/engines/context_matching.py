# SPDX-License-Identifier: Apache-2.0
"""What tests ask of V2 workers that look for continuations in texts, and change of them."""

from typing import Any

import torch


def probabilities(worker: Any) -> list[Any]:
    """How probable nodes on paths are, as was learned: see `ContextMatching`."""
    found: torch.Tensor = worker.model_runner.speculator.matching.probabilities
    return found.tolist()


def reload_drafter(worker: Any) -> None:
    """As after sleep level 2."""
    speculator = worker.model_runner.speculator
    speculator.replace_weights(speculator.read_again())
