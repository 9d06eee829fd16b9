"""What a step drafts: always the same (`FixedDrafting`), or what pays (`AdaptiveDrafting`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm_redrafter.budget.batch_budget import FIRST_DRAFTS, FIRST_STEPS, BatchBudget, Plan
from vllm_redrafter.budget.choice import Flags, Terms
from vllm_redrafter.engine.cpu.proposer import Draft, TreeProposer
from vllm_redrafter.engine.cpu.walk import accepted_nodes, judged_nodes
from vllm_redrafter.engine.stats import StepStats
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.policy import search_shape
from vllm_redrafter.tree.token_tree import TokenTree


class FixedDrafting:
    """K nodes per request, by one search, at every step."""

    def __init__(self, proposer: TreeProposer) -> None:
        self.proposer = proposer

    def pays(self, request_ids: Sequence[str], sampled: Flags, max_nodes: int) -> bool:
        """Shall this step draft at all? Asked before every draft.

        Args:
            request_ids: of R requests, those that have drawn a token.
            sampled: [R] bool, those that sample it; the others take the most probable one.
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
    """As many nodes of the whole batch as pay, by a search that pays, or none."""

    def __init__(self, proposer: TreeProposer, budget: BatchBudget, stats: StepStats) -> None:
        super().__init__(proposer)
        self.budget, self.stats = budget, stats
        # By request: [K+1], the draft's log-odds of the tree drafted last.
        self._log_odds: dict[str, npt.NDArray[np.float32]] = {}
        # The last draft, and its requests.
        self._drafted: list[str] = []
        self._draft: Draft | None = None
        self._plan = Plan(None, pays=False)
        self._terms: Terms | None = None
        # Steps for which both still hold, if all is as it was.
        self._holds = 0
        # Of the step: its requests, which of them sample, and how much may be verified.
        self._requests: list[str] = []
        self._max_nodes = 0
        self._sampled = np.zeros(0, dtype=np.bool_)
        self._warm_up()

    def _warm_up(self) -> None:
        """Let numba compile the budget's loops now: see `warm_up.py`."""
        config = self.budget.config
        budget = BatchBudget(config, self.budget.costs, max_requests=1)
        shape = search_shape(config, config.num_speculative_tokens)
        explored = np.zeros((1, shape.beam_length, shape.beam_width), np.float32)
        sampled = np.zeros(1, dtype=np.bool_)
        for _ in range(FIRST_DRAFTS):
            budget.drafted(shape, explored, sampled, 1.0)
        for _ in range(FIRST_STEPS + 1):
            budget.plan(sampled, None, config.num_speculative_tokens)
        budget.terms(1, Plan(shape, pays=True))

    def pays(self, request_ids: Sequence[str], sampled: Flags, max_nodes: int) -> bool:
        """See `FixedDrafting.pays`; a probe counts as if it did."""
        before, self._requests = self._requests, list(request_ids)
        joined = None
        # Mostly they are the same, in the same order, which is found sooner.
        if before != self._requests:
            known = frozenset(before)
            new = [request not in known for request in request_ids]
            joined = np.array(new) if any(new) else None
        elif self._goes_on(max_nodes):
            return self._plan.shape is not None
        self._max_nodes = max_nodes
        self._sampled = sampled
        self._plan = plan = self.budget.plan(sampled, joined, max_nodes)
        self._holds = plan.steps - 1
        drafts = plan.shape is not None
        self._terms = self.budget.terms(len(request_ids), plan) if drafts else None
        return drafts

    def skips_draft(self, request_ids: Sequence[str], max_nodes: int) -> bool:
        """See `FixedDrafting.skips_draft`: not drafted for, and the plan holds."""
        at_rest = self._plan.shape is None and self._requests == request_ids
        return at_rest and self._goes_on(max_nodes)

    def _goes_on(self, max_nodes: int) -> bool:
        """Does the last plan hold for another step of its requests? Then this is one of them."""
        if not self._holds or max_nodes != self._max_nodes:
            return False
        self._holds -= 1
        self.budget.again()
        return True

    def draft(
        self,
        request_ids: Sequence[str],
        hidden: Tensor,
        roots: Tensor,
        chain: Tensor | None,
        most: npt.NDArray[np.int64],
    ) -> TokenTree:
        """See `FixedDrafting.draft`."""
        shape, terms = self._plan.shape, self._terms
        assert shape is not None and terms is not None
        draft = self.proposer.propose_best(hidden, roots, chain, most, self._sampled, shape, terms)
        self.stats.expected_tokens += draft.expected
        self._drafted, self._draft = list(request_ids), draft
        self._log_odds.update(zip(request_ids, draft.log_odds, strict=True))
        return draft.tree

    def took(self, requests: int, seconds: float) -> None:
        """Learn what such a draft costs, and what the search found."""
        assert self._plan.shape is not None and self._draft is not None
        if not self.budget.learns:
            return
        self.budget.drafted(self._plan.shape, self._draft.explored, self._sampled, seconds)

    def judge(
        self,
        request_ids: Sequence[str],
        sampled: Flags,
        tree: TokenTree,
        accepted: AcceptedPath,
    ) -> None:
        """Learn how probable a node is to be accepted."""
        # Mostly they are the same.
        if request_ids == self._drafted:
            assert self._draft is not None
            drafted = self._draft.survival, self._draft.tree
            self.budget.verified(*accepted_nodes(sampled, *drafted, tree, accepted))
        if not self.budget.learns:
            return
        slots = tree.tokens.shape[1]
        none = np.zeros(slots, dtype=np.float32)
        log_odds = np.stack([self._log_odds.get(request, none)[:slots] for request in request_ids])
        of_request, *nodes = judged_nodes(tree, accepted.path, log_odds)
        self.proposer.acceptance.judge(sampled[of_request], *nodes)

    def stepped(self, kind: int, requests: int, rows: int, seconds: float) -> None:
        """Learn what such a step costs."""
        self.budget.stepped(kind, requests, rows, seconds)

    def forget(self, request_id: str) -> None:
        self._log_odds.pop(request_id, None)
