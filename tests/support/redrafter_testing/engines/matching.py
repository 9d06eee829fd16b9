# SPDX-License-Identifier: Apache-2.0
"""A planner that drafts nothing and verifies what is found in the text: see `forced_budget.py`."""

from redrafter_testing.engines.forced_budget import AlwaysDrafts
from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.tree.policy import MATCH_TREE, SearchShape


class MatchesAlone(AlwaysDrafts):
    """All of it, at every step."""

    def plan(self, sampled: Flags, max_nodes: int) -> SearchShape | None:
        self.shape = MATCH_TREE
        return self.shape
