# SPDX-License-Identifier: Apache-2.0
"""What a step drafts: always the same search, or what pays; and what is learned from its trees."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.drafting.acceptance_model import FIRST_REFIT, AcceptanceModel
from vllm_redrafter.drafting.earlier_answers import AnswerStore
from vllm_redrafter.drafting.own_matches import own_matches
from vllm_redrafter.drafting.proposer import Draft, Proposer, States
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.drafting.walk import accepted_nodes, judged_nodes
from vllm_redrafter.tree.acceptance import AcceptedPath, accept_path
from vllm_redrafter.tree.context_matches import LENGTH_CLASSES, LONGEST_MATCH, ContextMatches
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.token_tree import TokenTree


class Drafting:
    """Drafts for the requests of one engine.

    Attributes:
        proposer: searches, and builds the trees.
        stats: where nodes are counted.
        planner: chooses the search, and what to verify of it. None to draft K nodes per request at
            every step.
    """

    def __init__(self, proposer: Proposer[Any], stats: StepStats) -> None:
        self.proposer, self.stats = proposer, stats
        self.planner: BatchPlanner | None = None
        # By request: [2, K+1], log-odds and lengths of matches of its last tree.
        self._sources: dict[str, npt.NDArray[np.float32]] = {}
        self._drafted: list[str] = []
        self._draft: Draft | None = None
        self._requests: list[str] = []
        self._max_nodes = 0
        self._sampled = np.zeros(0, dtype=np.bool_)

    def plan(
        self, request_ids: Sequence[str], sampled: Flags, max_nodes: int, requested_nodes: int
    ) -> SearchShape | None:
        """Choose the search of this step's draft; None to draft nothing. Called before every draft.

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
        """Whether this step drafts nothing, as planned for the same batch; `plan` is not called.

        `max_nodes` is that of `plan`, or 0.
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
        """Trees with K + 1 slots, for the R requests of the plan; arguments as of `propose`."""
        planner, sampled = self.planner, self._sampled
        verify_costs = None if planner is None else planner.verify_costs(len(roots))
        draft = self.proposer.propose(
            states, roots, chain, max_nodes, sampled, shape, verify_costs, matches
        )
        self._drafted, self._draft = self._requests, draft
        if planner is not None or matches is not None:
            sources = np.stack([draft.log_odds, draft.match_classes], axis=1, dtype=np.float32)
            self._sources.update(zip(self._requests, sources, strict=True))
        if planner is not None:
            self.stats.expected_tokens += draft.expected
            if matches is not None:
                given_parent = self.proposer.match_acceptance.probabilities
                alone = _path_survival(given_parent, matches, sampled)
                planner.matched(draft.tokens_per_second, alone)
        return draft.tree

    def record_draft_time(self, seconds: float) -> None:
        """Learn the time of the last draft, and what its search visited."""
        assert self._draft is not None
        if self.planner is not None and self._draft.explored.size:
            self.planner.drafted(self._draft.explored, self._sampled, seconds)

    def record_step_time(
        self, step: tuple[int, int, int], tokens: int, seconds: float, draft_seconds: float
    ) -> None:
        """Learn and count a step's time, with vLLM's part and its draft's `draft_seconds`.

        The step is its kind (PLAIN, CHAINS or TREES), requests, and rows, none of them of a prompt.
        """
        if self.planner is None:
            return
        self.planner.stepped(*step, seconds - draft_seconds)
        if plain_seconds := self.planner.times.plain_seconds(requests := step[1]):
            self.stats.decoding_seconds += seconds
            self.stats.plain_seconds += tokens / requests * plain_seconds

    def observe(
        self, request_ids: Sequence[str], sampled: Flags, tree: TokenTree, accepted: AcceptedPath
    ) -> None:
        """Learn from what was accepted of the trees of R requests, and count nodes of matches."""
        if self.planner is not None and request_ids == self._drafted:
            assert self._draft is not None
            drafted = self._draft.survival, self._draft.tree
            self.planner.profile.verified(*accepted_nodes(sampled, *drafted, tree, accepted))
        if not self._sources:
            return
        slots = tree.tokens.shape[1]
        none = np.zeros((2, slots), dtype=np.float32)
        sources = np.stack([self._sources.get(r, none)[:, :slots] for r in request_ids])
        of_request, log_odds, match_classes, depths, was_accepted = judged_nodes(
            tree, accepted.path, sources
        )
        kinds, on_path = sampled[of_request], match_classes > 0
        own, earlier = _by_source(sources[:, 1][tree.is_node.numpy()])
        self.stats.matched_tokens += own
        self.stats.earlier_tokens += earlier
        own, earlier = _by_source(match_classes[was_accepted])
        self.stats.accepted_matched_tokens += own
        self.stats.accepted_earlier_tokens += earlier
        self.proposer.match_acceptance.observe(
            kinds[on_path], match_classes[on_path], depths[on_path], was_accepted[on_path]
        )
        if self.planner is not None:
            by_draft = log_odds > -np.inf
            nodes = log_odds[by_draft], depths[by_draft], was_accepted[by_draft]
            self.proposer.acceptance.observe(kinds[by_draft], *nodes)

    def forget(self, request_id: str) -> None:
        self._sources.pop(request_id, None)


def _by_source(classes: npt.NDArray[Any]) -> tuple[int, int]:
    """How many nodes continue own text, and earlier answers, by the classes of their matches."""
    of_length = (classes - 1) % LENGTH_CLASSES
    earlier = int(np.count_nonzero((classes > 0) & (of_length >= LONGEST_MATCH)))
    return int(np.count_nonzero(classes)) - earlier, earlier


def _path_survival(
    probabilities: npt.NDArray[np.float32], matches: ContextMatches, sampled: Flags
) -> npt.NDArray[np.float64]:
    """[R, M, D]: how probable the paths' nodes are to be accepted; 0 where there is none."""
    classes = matches.classes.numpy()
    kinds, depths = sampled.astype(np.int64)[:, None, None], np.arange(classes.shape[2])
    given_parent = np.where(classes > 0, probabilities[kinds, classes - 1, depths], 0.0)
    return np.asarray(given_parent.cumprod(axis=2, dtype=np.float64))


def warm_up(proposer: Proposer[States], states: States) -> TokenTree:
    """Draft for one request, and accept nothing of it: compile the loops before there are requests.

    The budget would learn from steps that wait for numba. Returns what was drafted.
    """
    slots = proposer.config.num_speculative_tokens + 1
    root = torch.zeros(1, dtype=torch.int64)
    greedy = np.zeros(1, dtype=np.bool_)
    all_nodes = np.full(1, slots - 1)
    shape = proposer.shape(slots - 1)
    paths = max(proposer.config.context_matches, 1), proposer.config.path_length
    text = np.zeros((1, 2), np.int32), np.zeros(1, np.int64), np.array([2])
    matches = own_matches(*text, paths, vocab_size=1)
    tree = proposer.propose(states, root, None, all_nodes, greedy, shape, None, matches).tree
    accepted = accept_path(tree, torch.full_like(tree.tokens, -1))
    if proposer.config.earlier_answers:
        answers = AnswerStore(1, 1, places=8)
        answers.enter(np.zeros(4, dtype=np.int32), 0)
        partitions = np.zeros(1, dtype=np.int64)
        answers.with_earlier(
            matches, text, partitions, greedy, proposer.match_acceptance.probabilities
        )
    accepted_nodes(greedy, np.zeros((1, slots), dtype=np.float32), tree, tree, accepted)
    sources = np.zeros((1, 2, slots), dtype=np.float32)
    _, log_odds, _, *judged = judged_nodes(tree, accepted.path, sources)
    acceptance = AcceptanceModel(proposer.config.beam_length)
    for _ in range(FIRST_REFIT):
        acceptance.observe(np.zeros(len(log_odds), dtype=np.bool_), log_odds, *judged)
    return tree
