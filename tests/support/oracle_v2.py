"""The oracle for Model Runner V2: a speculator that knows the continuation."""

from __future__ import annotations

from pathlib import Path

from oracle import Oracle
from torch import Tensor, nn

from vllm_redrafter.beam_search import ExploredNodes
from vllm_redrafter.engine.v2.speculator import TreeSpeculator


class OracleSpeculator(TreeSpeculator):
    def load_model(self, target: nn.Module) -> None:
        super().load_model(target)
        self.oracle = Oracle(Path(self.checkpoint), self.drafter.config.vocab_size)

    def explore(self, hidden: Tensor, roots: Tensor) -> ExploredNodes:
        return self.oracle.explore(hidden)


def use() -> None:
    """Engines started in this process draft with the oracle, whatever else is as always."""
    from vllm_redrafter import plugin

    plugin.V2_SPECULATOR = "oracle_v2.OracleSpeculator"
