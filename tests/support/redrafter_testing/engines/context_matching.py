"""What tests ask of V2 workers that look for continuations in texts, with a drafter or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def probabilities(worker: Any) -> list[Any]:
    """How probable nodes on paths are, as was learned: see `ContextMatching`."""
    found: torch.Tensor = worker.model_runner.speculator.matching.probabilities
    return found.tolist()


def stop(worker: Any) -> None:
    """Nobody looks for continuations from here on."""
    worker.model_runner.speculator.matching = None


def reload_drafter(worker: Any) -> None:
    """As after sleep level 2."""
    worker.model_runner.speculator.reload()


def use_without_drafter() -> None:
    """Engines started in this process have none, and replay graphs, as on a GPU."""
    from redrafter_testing.gpu import recorded_graphs
    from vllm_redrafter.engine.speculation import Settings

    recorded_graphs.use()
    of = Settings.of
    Settings.of = lambda config: replace(of(config), model=None, target_layers=())
