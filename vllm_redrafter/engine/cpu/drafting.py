"""What a step drafts: always the same (`FixedDrafting`), or what pays (`AdaptiveDrafting`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.engine.cpu.proposer import Draft, TreeProposer
from vllm_redrafter.engine.cpu.walk import accepted_nodes, judged_nodes
from vllm_redrafter.engine.stats import StepStats
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.token_tree import TokenTree


class FixedDrafting:
    """K nodes per request, by one search, at every step."""

    def __init__(self, proposer: TreeProposer) -> None:
        self.proposer = proposer

    def pays(self, request_ids: Sequence[str], sampled: Flags, max_nodes: int) -> bool:
        """Shall this step draft at all? Asked before every draft.

        Args:
            request_ids: of R requests, those that have drawn a token.
            sampled: [R] bool, those that sample it.
            max_nodes: what the next step can verify per request; at least 1.
        """
        return True

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
        hidden: Tensor,
        roots: Tensor,
        chain: Tensor | None,
        most: npt.NDArray[np.int64],
    ) -> TokenTree:
        """Draft for R requests.

        Args:
            request_ids: whose they are.
            hidden: [R, (1 + n) H], see `TreeProposer.propose`.
            roots: [R] int64, the last sampled tokens.
            chain: [R] bool, requests that need a chain; None where none does.
            most: [R], the most nodes of each request; somewhere above 0.

        Returns:
            Trees with K + 1 slots.
        """
        return self.proposer.propose(hidden, roots, chain, most)

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
        and others: nothing, here."""

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


class AdaptiveDrafting(FixedDrafting):
    """As many nodes of the whole batch as are worth it, by the search that is the fastest, or none.

    Attributes:
        planner: decides whether to draft and by which search, and what to verify of it.
    """

    def __init__(self, proposer: TreeProposer, planner: BatchPlanner, stats: StepStats) -> None:
        super().__init__(proposer)
        self.planner, self.stats = planner, stats
        # By request: [K+1], the draft's log-odds of the tree drafted last.
        self._log_odds: dict[str, npt.NDArray[np.float32]] = {}
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

    def skips_draft(self, request_ids: Sequence[str], max_nodes: int) -> bool:
        """See `FixedDrafting.skips_draft`: nothing was drafted for this very batch."""
        same = max_nodes == self._max_nodes and self._requests == request_ids
        return same and self.planner.pass_plain_step()

    def draft(
        self,
        request_ids: Sequence[str],
        hidden: Tensor,
        roots: Tensor,
        chain: Tensor | None,
        most: npt.NDArray[np.int64],
    ) -> TokenTree:
        """See `FixedDrafting.draft`."""
        shape = self.planner.shape
        assert shape is not None
        terms = self.planner.terms(len(request_ids))
        draft = self.proposer.propose_best(hidden, roots, chain, most, self._sampled, shape, terms)
        self.stats.expected_tokens += draft.expected
        self._drafted, self._draft = list(request_ids), draft
        self._log_odds.update(zip(request_ids, draft.log_odds, strict=True))
        return draft.tree

    def took(self, requests: int, seconds: float) -> None:
        """Learn what such a draft costs, and what the search found."""
        assert self._draft is not None
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
        slots = tree.tokens.shape[1]
        none = np.zeros(slots, dtype=np.float32)
        log_odds = np.stack([self._log_odds.get(request, none)[:slots] for request in request_ids])
        of_request, *nodes = judged_nodes(tree, accepted.path, log_odds)
        self.proposer.acceptance.judge(sampled[of_request], *nodes)

    def stepped(self, kind: int, requests: int, rows: int, seconds: float) -> None:
        """Learn what such a step costs."""
        self.planner.stepped(kind, requests, rows, seconds)

    def forget(self, request_id: str) -> None:
        self._log_odds.pop(request_id, None)
