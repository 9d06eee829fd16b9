# SPDX-License-Identifier: Apache-2.0
"""The oracle for Model Runner V2: a speculator that knows the continuation."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter_testing.oracles import V2_ORACLE
from redrafter_testing.oracles.oracle import WIDTH, Oracle
from vllm_redrafter.engine.v2.speculator import TreeSpeculator
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape


class OracleSpeculator(TreeSpeculator):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trunk.load_model = partial(self._load, self.trunk.load_model)

    def _load(self, load_model: Callable[[nn.Module], None], target: nn.Module) -> None:
        load_model(target)
        sure, trunk = self.config.tree == "chain", self.trunk
        self.oracle = Oracle(Path(trunk.checkpoint.model), trunk.drafter.config.vocab_size, sure)
        for search in trunk.searches.values():
            search.explored = partial(self._known, search.shape)

    def _known(self, shape: SearchShape, hidden: Tensor, roots: Tensor) -> ExploredNodes:
        width, length = shape
        known = self.oracle.explore(hidden, min(WIDTH, width), length)
        rest = 0, max(width - WIDTH, 0)
        return ExploredNodes(
            pad(known.tokens, rest),
            pad(known.back_pointers, rest),
            pad(known.log_probs, rest, value=-torch.inf),
        )


def use() -> None:
    """Engines started in this process draft with the oracle, whatever else is as always."""
    from vllm_redrafter.utils import names

    names.V2_SPECULATOR = V2_ORACLE


def schedule_asynchronously() -> None:
    """As vLLM decides on a GPU; its CPU platform takes it back."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def keep(cls: type, vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    CpuPlatform.check_and_update_config = classmethod(keep)
