# SPDX-License-Identifier: Apache-2.0
"""What a step drafts: always the same search, or what pays; and what is learned from its trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.drafting.proposer import Draft, Proposer
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.drafting.walk import accepted_nodes, judged_nodes
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.token_tree import TokenTree


class Drafting:
    """Drafts for the requests of one engine.

    Attributes:
        proposer: searches, and builds the trees.
        stats: where nodes are counted.
        planner: decides whether to draft and by which search, and what to verify of it. None to
            draft K nodes per request, by one search, at every step.
    """

    def __init__(
        self, proposer: Proposer[Any], stats: StepStats, planner: BatchPlanner | None = None
    ) -> None:
        self.proposer, self.stats, self.planner = proposer, stats, planner
        # By request: [2, K+1], log-odds and lengths of matches of the tree drafted last.
        self._sources: dict[str, npt.NDArray[np.float32]] = {}
        # The last draft, and its requests.
        self._drafted: list[str] = []
        self._draft: Draft | None = None
        # Of the step: its requests, which of them sample, and how much may be verified.
        self._requests: list[str] = []
        self._max_nodes = 0
        self._sampled = np.zeros(0, dtype=np.bool_)

    def plan(
        self, request_ids: Sequence[str], sampled: Flags, max_nodes: int, requested_nodes: int
    ) -> SearchShape | None:
        """Choose the search of this step's draft; None to draft nothing. Asked before every draft.

        Args:
            request_ids: of R requests, those that have drawn a token.
            sampled: [R] bool, those that sample it.
            max_nodes: what the next step can verify per request; at least 1.
            requested_nodes: the most that any of these requests takes of it; at least 1.
        """
        self._requests, self._max_nodes, self._sampled = list(request_ids), max_nodes, sampled
        if self.planner is None:
            return self.proposer.shape(requested_nodes)
        return self.planner.plan(sampled, max_nodes)

    def skips_draft(self, request_ids: Sequence[str], max_nodes: int) -> bool:
        """Is it settled that this step drafts nothing? Then `plan` need not be asked.

        Args:
            request_ids: the step's; settled is what was planned for the very same batch.
            max_nodes: see `plan`, or 0.
        """
        if self.planner is None or max_nodes != self._max_nodes or request_ids != self._requests:
            return False
        return self.planner.pass_plain_step()

    def draft(
        self,
        states: Any,
        roots: Tensor,
        chain: Tensor | None,
        max_nodes: npt.NDArray[np.int64],
        shape: SearchShape,
        matches: ContextMatches | None = None,
    ) -> TokenTree:
        """Draft for the R requests of the plan.

        Args:
            states: the target's, see `Proposer.explore`.
            roots: [R] int64, the last sampled tokens.
            chain: [R] bool, requests that need a chain; None where none does.
            max_nodes: [R], the most nodes of each request; somewhere above 0.
            shape: what was planned.
            matches: of their texts; None where nobody looked.

        Returns:
            Trees with K + 1 slots.
        """
        planner, sampled = self.planner, self._sampled
        verify_costs = None if planner is None else planner.verify_costs(len(roots))
        draft = self.proposer.propose(
            states, roots, chain, max_nodes, sampled, shape, verify_costs, matches
        )
        self._drafted, self._draft = self._requests, draft
        if planner is not None or matches is not None:
            sources = np.stack([draft.log_odds, draft.match_lengths], axis=1, dtype=np.float32)
            self._sources.update(zip(self._requests, sources, strict=True))
        if planner is not None:
            self.stats.expected_tokens += draft.expected
            if matches is not None:
                alone = self.proposer.path_survival(matches, sampled)
                planner.matched(draft.probable, alone)
        return draft.tree

    def record_draft_time(self, seconds: float) -> None:
        """Learn what the last draft took, and what its search found."""
        assert self._draft is not None
        if self.planner is not None and self._draft.explored.size:
            self.planner.drafted(self._draft.explored, self._sampled, seconds)

    def record_step_time(self, kind: int, requests: int, rows: int, seconds: float) -> None:
        """Learn what a step took, its draft left out.

        Args:
            kind: PLAIN, CHAINS or TREES.
            requests: R.
            rows: how many, all of them of nodes: no prompt was read.
            seconds: vLLM's part included.
        """
        if self.planner is not None:
            self.planner.stepped(kind, requests, rows, seconds)

    def observe(
        self, request_ids: Sequence[str], sampled: Flags, tree: TokenTree, accepted: AcceptedPath
    ) -> None:
        """Learn from what was accepted of the trees of R requests, those that sample ([R] bool)
        and others; and count nodes of matches."""
        if self.planner is not None and request_ids == self._drafted:
            assert self._draft is not None
            drafted = self._draft.survival, self._draft.tree
            self.planner.verified(*accepted_nodes(sampled, *drafted, tree, accepted))
        if not self._sources:
            return
        slots = tree.tokens.shape[1]
        none = np.zeros((2, slots), dtype=np.float32)
        sources = np.stack([self._sources.get(r, none)[:, :slots] for r in request_ids])
        of_request, log_odds, match_lengths, depths, was_accepted = judged_nodes(
            tree, accepted.path, sources
        )
        kinds, on_path = sampled[of_request], match_lengths > 0
        self.stats.matched_tokens += int(((sources[:, 1] > 0) & tree.is_node.numpy()).sum())
        self.stats.accepted_matched_tokens += int(np.count_nonzero(on_path & was_accepted))
        self.proposer.match_acceptance.observe(
            kinds[on_path], match_lengths[on_path], depths[on_path], was_accepted[on_path]
        )
        if self.planner is not None:
            by_draft = log_odds > -np.inf
            nodes = log_odds[by_draft], depths[by_draft], was_accepted[by_draft]
            self.proposer.acceptance.observe(kinds[by_draft], *nodes)

    def forget(self, request_id: str) -> None:
        """The request has left the engine."""
        self._sources.pop(request_id, None)
