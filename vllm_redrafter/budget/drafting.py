"""What a step drafts: always the same (`FixedDrafting`), or what pays (`AdaptiveDrafting`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.budget.proposer import Draft, Proposer
from vllm_redrafter.budget.stats import StepStats
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.tree.walk import accepted_nodes, judged_nodes

Array = npt.NDArray[Any]


class FixedDrafting:
    """K nodes per request, by one search, at every step."""

    def __init__(self, proposer: Proposer[Any], stats: StepStats) -> None:
        self.proposer, self.stats = proposer, stats
        # By request: [2, K+1], log-odds and lengths of matches of the tree drafted last.
        self._sources: dict[str, npt.NDArray[np.float32]] = {}

    def pays(self, request_ids: Sequence[str], sampled: Flags, max_nodes: int) -> bool:
        """Shall this step draft at all? Asked before every draft.

        Args:
            request_ids: of R requests, those that have drawn a token.
            sampled: [R] bool, those that sample it.
            max_nodes: what the next step can verify per request; at least 1.
        """
        return True

    def shape(self, max_nodes: int) -> SearchShape:
        """The search of a draft that pays, of which at most so many nodes are verified."""
        return self.proposer.shape(max_nodes)

    def skips_draft(self, request_ids: Sequence[str], max_nodes: int) -> bool:
        """Is it settled that this step drafts nothing? Then `pays` need not be asked.

        Args:
            request_ids: the step's.
            max_nodes: see `pays`, or 0.
        """
        return False

    def draft(
        self,
        request_ids: Sequence[str],
        states: Any,
        roots: Tensor,
        chain: Tensor | None,
        most: npt.NDArray[np.int64],
        matches: ContextMatches | None = None,
    ) -> TokenTree:
        """Draft for R requests.

        Args:
            request_ids: whose they are.
            states: the target's, see `Proposer.explore`.
            roots: [R] int64, the last sampled tokens.
            chain: [R] bool, requests that need a chain; None where none does.
            most: [R], the most nodes of each request; somewhere above 0.
            matches: of their texts; None where nobody looked.

        Returns:
            Trees with K + 1 slots.
        """
        tree, match_lengths = self.proposer.propose(states, roots, chain, most, matches)
        if matches is not None:
            self._remember(request_ids, np.zeros(match_lengths.shape), match_lengths)
        return tree

    def took(self, requests: int, seconds: float) -> None:
        """Learn from the time of the last draft, for R requests: nothing, here."""

    def judge(
        self,
        request_ids: Sequence[str],
        sampled: Flags,
        tree: TokenTree,
        accepted: AcceptedPath,
    ) -> None:
        """Learn from what was accepted of the trees of R requests, those that sample ([R] bool)
        and others."""
        if self._sources:
            self._judged(request_ids, sampled, tree, accepted)

    def _remember(self, request_ids: Sequence[str], log_odds: Array, match_lengths: Array) -> None:
        """Keep where the nodes of R requests come from, [R, K+1] each, until they are judged."""
        sources = np.stack([log_odds, match_lengths], axis=1).astype(np.float32)
        self._sources.update(zip(request_ids, sources, strict=True))

    def _judged(
        self, request_ids: Sequence[str], sampled: Flags, tree: TokenTree, accepted: AcceptedPath
    ) -> tuple[Flags, Array, Array, Flags]:
        """Learn how probable nodes on paths are to be accepted, and count them.

        Returns:
            Of judged nodes: whether their requests sample, log-odds, depths, whether accepted.
        """
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
        return kinds, log_odds, depths, was_accepted

    def stepped(self, kind: int, requests: int, rows: int, seconds: float) -> None:
        """Learn from the time of a step, its draft's left out: nothing, here.

        Args:
            kind: PLAIN, CHAINS or TREES.
            requests: R.
            rows: how many, all of them of nodes: no prompt was read.
            seconds: vLLM's part included.
        """

    def forget(self, request_id: str) -> None:
        """The request has left the engine."""
        self._sources.pop(request_id, None)


class AdaptiveDrafting(FixedDrafting):
    """As many nodes of the whole batch as are worth it, by the search that is the fastest, or none.

    Attributes:
        planner: decides whether to draft and by which search, and what to verify of it.
    """

    def __init__(self, proposer: Proposer[Any], planner: BatchPlanner, stats: StepStats) -> None:
        super().__init__(proposer, stats)
        self.planner = planner
        # The last draft, and its requests.
        self._drafted: list[str] = []
        self._draft: Draft | None = None
        # Of the step: its requests, which of them sample, and how much may be verified.
        self._requests: list[str] = []
        self._max_nodes = 0
        self._sampled = np.zeros(0, dtype=np.bool_)

    def pays(self, request_ids: Sequence[str], sampled: Flags, max_nodes: int) -> bool:
        """See `FixedDrafting.pays`; an exploration counts as if it did."""
        self._requests, self._max_nodes, self._sampled = list(request_ids), max_nodes, sampled
        return self.planner.plan(sampled, max_nodes) is not None

    def shape(self, max_nodes: int) -> SearchShape:
        """See `FixedDrafting.shape`: what was planned by `pays`."""
        assert self.planner.shape is not None
        return self.planner.shape

    def skips_draft(self, request_ids: Sequence[str], max_nodes: int) -> bool:
        """See `FixedDrafting.skips_draft`: nothing was drafted for this very batch."""
        same = max_nodes == self._max_nodes and self._requests == request_ids
        return same and self.planner.pass_plain_step()

    def draft(
        self,
        request_ids: Sequence[str],
        states: Any,
        roots: Tensor,
        chain: Tensor | None,
        most: npt.NDArray[np.int64],
        matches: ContextMatches | None = None,
    ) -> TokenTree:
        """See `FixedDrafting.draft`."""
        shape = self.shape(self._max_nodes)
        terms = self.planner.terms(len(request_ids))
        draft = self.proposer.propose_best(
            states, roots, chain, most, self._sampled, shape, terms, matches
        )
        self.stats.expected_tokens += draft.expected
        self._drafted, self._draft = list(request_ids), draft
        self._remember(request_ids, draft.log_odds, draft.match_lengths)
        if matches is not None:
            alone = self.proposer.path_survival(matches, self._sampled)
            self.planner.matched(draft.probable, alone)
        return draft.tree

    def took(self, requests: int, seconds: float) -> None:
        """Learn what such a draft costs, and what the search found."""
        assert self._draft is not None
        if self._draft.explored.size:
            self.planner.drafted(self._draft.explored, self._sampled, seconds)

    def judge(
        self,
        request_ids: Sequence[str],
        sampled: Flags,
        tree: TokenTree,
        accepted: AcceptedPath,
    ) -> None:
        """Learn how probable a node is to be accepted."""
        if request_ids == self._drafted:
            assert self._draft is not None
            drafted = self._draft.survival, self._draft.tree
            self.planner.verified(*accepted_nodes(sampled, *drafted, tree, accepted))
        kinds, log_odds, depths, was_accepted = self._judged(request_ids, sampled, tree, accepted)
        by_draft = log_odds > -np.inf
        nodes = log_odds[by_draft], depths[by_draft], was_accepted[by_draft]
        self.proposer.acceptance.judge(kinds[by_draft], *nodes)

    def stepped(self, kind: int, requests: int, rows: int, seconds: float) -> None:
        """Learn what such a step costs."""
        self.planner.stepped(kind, requests, rows, seconds)
