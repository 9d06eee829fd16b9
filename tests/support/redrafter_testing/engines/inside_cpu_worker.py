# SPDX-License-Identifier: Apache-2.0
"""What tests ask of a CPU worker from inside its process, by `Engine.rpc`."""

import random
import sys
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from vllm_redrafter.budget.choice import Flags, VerifyCosts, verify_everything
from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.tree.policy import MATCHES, SearchShape, search_shape


class AlwaysDrafts(BatchPlanner):
    """Drafts at every step, and verifies all of it."""

    def plan(self, sampled: Flags, max_nodes: int) -> SearchShape | None:
        self.shape = search_shape(self.config, max_nodes)
        return self.shape

    def pass_plain_step(self) -> bool:
        return False

    def verify_costs(self, requests: int) -> VerifyCosts:
        return verify_everything(requests * (self.config.num_speculative_tokens + 1))


class MatchesAlone(AlwaysDrafts):
    """Drafts nothing, and verifies the prompt-lookup (n-gram) matches of the text."""

    def plan(self, sampled: Flags, max_nodes: int) -> SearchShape | None:
        self.shape = MATCHES
        return self.shape


class RandomPlanner(AlwaysDrafts):
    """Another search, or none, at most steps, and any number of its nodes."""

    random = random.Random(0)

    def plan(self, sampled: Flags, max_nodes: int) -> SearchShape | None:
        most = search_shape(self.config, max_nodes)
        possible = [
            arm
            for arm in self.arms
            if arm is None
            or (arm.beam_width <= most.beam_width and arm.beam_length <= most.beam_length)
        ]
        self.shape = self.random.choice(possible)
        return self.shape

    def pass_plain_step(self) -> bool:
        return self.shape is None and self.random.random() < 0.5

    def verify_costs(self, requests: int) -> VerifyCosts:
        """Of the nodes, or of chains of them, the best ones of the whole batch: any number."""
        rows = requests * (self.config.num_speculative_tokens + 1)
        nodes = self.random.randint(0, rows - requests)
        verify = np.where(np.arange(rows + 1) <= requests + nodes, 1.0, 1e6)
        return VerifyCosts(np.ones(2), 0.0, verify, verify * self.random.choice((0.1, 10.0)), 0)


class NeverDrafts(BatchPlanner):
    """Never drafts; mostly without being asked."""

    passed = 0

    def plan(self, sampled: Flags, max_nodes: int) -> SearchShape | None:
        self.passed = 0
        return None

    def pass_plain_step(self) -> bool:
        self.passed += 1
        return self.passed < 8


def force(worker: Any, planner: type[BatchPlanner] | None) -> None:
    """Let a planner of this kind decide; None for the engine's own again."""
    drafting = worker.model_runner.drafting
    own = vars(worker).setdefault("own_planner", drafting.planner)
    drafting.planner = own
    if planner is not None:
        drafting.planner = planner(own.config, own.times.table, worker.model_runner.max_num_reqs)


def traced_graphs(_: object) -> int:
    """How many torch has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def compiled_loops(_: object) -> dict[str, list[str]]:
    """By function: the arguments' types that numba compiled it for, or read from disk for."""
    modules = [module for name, module in sys.modules.items() if name.startswith("vllm_redrafter.")]
    return {
        f"{module.__name__}.{name}": [str(types) for types in loop.signatures]
        for module in modules
        for name, loop in vars(module).items()
        if isinstance(loop, Dispatcher)
    }


def record_candidates(worker: Any) -> None:
    """Fill `worker.candidates` with how many candidates each draft chooses from."""
    from vllm_redrafter.engine.cpu.v1 import proposer

    search, worker.candidates = proposer.search, set()

    def recorded(*given: Any) -> Any:
        worker.candidates.add(given[-1])
        return search(*given)

    proposer.search = recorded
