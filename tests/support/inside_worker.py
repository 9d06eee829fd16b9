"""What tests ask of a V2 worker from inside its process, by `InterpretedEngine.rpc`."""

from __future__ import annotations

from typing import Any


def head_and_trees(worker: Any) -> tuple[int, list[list[int]]]:
    """How many tokens the rank's draft head has rows for, and the tokens of its trees."""
    speculator = worker.model_runner.speculator
    return speculator.drafter.last_layer.weight.shape[0], speculator.trees.tokens.tolist()
