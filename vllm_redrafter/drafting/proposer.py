# SPDX-License-Identifier: Apache-2.0
"""From what a search found to the trees that are verified: ranked, joined with matches, cut.

Every engine proposes by this; what a search is, the engine says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.budget.choice import Flags, VerifyCosts, verify_everything
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.acceptance_model import AcceptanceModel
from vllm_redrafter.drafting.joining import DraftNodes, joined_nodes
from vllm_redrafter.drafting.match_acceptance import MatchAcceptance
from vllm_redrafter.drafting.ranking import best_trees
from vllm_redrafter.drafting.recorder import DraftRecorder
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.policy import (
    MATCH_TREE,
    SearchShape,
    candidate_log_probs,
    search_shape,
)
from vllm_redrafter.tree.token_tree import TokenTree

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
States = TypeVar("States")
"""What a search begins with: hidden states, as the engine has them."""


class Draft(NamedTuple):
    """Trees of what R requests are to verify, and what their nodes are expected to be worth.

    Attributes:
        tree: with K + 1 slots whatever the search, so that trees of different steps can be
            verified together.
        log_odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the
            root, -inf for nodes that are on a path alone.
        match_lengths: [R, K+1] int64, of the path that a node is on; 0 for none.
        survival: [R, K+1] float32, the probability that each node is accepted; 1 for the root, 0
            in unused slots.
        probable: [R, K] float64, the same of nodes that are not verified, too.
        explored: [R, L, W] float32, the same of all that the search visited, paths left out.
        expected: the tokens of those requests that verify something.
    """

    tree: TokenTree
    log_odds: Floats
    match_lengths: npt.NDArray[np.int64]
    survival: Floats
    probable: npt.NDArray[np.float64]
    explored: Floats
    expected: float


class Proposer(ABC, Generic[States]):
    """Proposes trees for the requests of one engine.

    Attributes:
        config: the most that is drafted.
        searches: there is a drafter; without one, paths found in the text are all there is.
        recorded: how its nodes were accepted where the drafter was measured.
        acceptance: how probable a node is to be accepted, learned by whoever judges the drafts.
        match_acceptance: the same of nodes on paths.
        recorder: is told of each draft's candidates, where there is one.
    """

    def __init__(
        self,
        config: ReDrafterConfig,
        searches: bool = False,
        recorded: PerSampling = NOTHING_RECORDED,
    ) -> None:
        self.config, self.searches, self.recorded = config, searches, recorded
        self.acceptance = AcceptanceModel(config.beam_length, recorded)
        self.match_acceptance = MatchAcceptance(config.path_length)
        self.recorder: DraftRecorder | None = None

    @abstractmethod
    def explore(self, states: States, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """What the drafter finds that continues the roots.

        Args:
            states: of R requests.
            root_tokens: [R] int64, the last sampled tokens.
            shape: the search.
        """

    def shape(self, max_nodes: int) -> SearchShape:
        """The search for a step that verifies at most so many nodes per request."""
        return search_shape(self.config, max_nodes) if self.searches else MATCH_TREE

    def propose(
        self,
        states: States,
        root_tokens: Tensor,
        chain: Tensor | None,
        max_nodes: npt.NDArray[np.int64],
        sampled: Flags,
        shape: SearchShape,
        verify_costs: VerifyCosts | None = None,
        matches: ContextMatches | None = None,
    ) -> Draft:
        """Draft trees for R requests, of those nodes that are worth verifying.

        Args:
            states: of the target, which predicted the root tokens; see `explore`.
            root_tokens: [R] int64.
            chain: [R] bool, requests that need a chain; None where none does.
            max_nodes: [R], the most nodes of each request, at most K; somewhere above 0.
            sampled: [R] bool, requests that sample; the others take the most probable token.
            shape: the search.
            verify_costs: what verifying costs. None to verify as many nodes as there may be, ranked
                by the draft's own probabilities.
            matches: of their texts; None where nobody looked.
        """
        nodes = self._candidates(states, root_tokens, shape, matches)
        all_nodes = self.config.num_speculative_tokens
        slopes, biases = self.acceptance.slopes, self.acceptance.biases
        if verify_costs is None:
            slopes, biases = np.ones_like(slopes), np.zeros_like(biases)
            verify_costs = verify_everything(len(root_tokens) * (all_nodes + 1))
        *tree, log_odds, match_lengths, survival, probable, explored, expected = best_trees(
            root_tokens.numpy(),
            nodes.tokens,
            nodes.back_pointers,
            nodes.log_probs,
            nodes.match_lengths,
            sampled,
            slopes,
            biases,
            self.match_acceptance.probabilities,
            max_nodes,
            all_nodes,
            *verify_costs,
            self._chains(sampled, chain, shape),
        )
        of_search = explored[:, : shape.beam_length, : shape.beam_width]
        trees = TokenTree(*map(torch.from_numpy, tree))
        return Draft(trees, log_odds, match_lengths, survival, probable, of_search, expected)

    def path_survival(self, matches: ContextMatches, sampled: Flags) -> npt.NDArray[np.float64]:
        """[R, M, D]: how probable the paths' nodes are to be accepted; 0 where there is none."""
        lengths = matches.lengths.numpy()
        kinds = sampled.astype(np.int64)[:, None]
        given_parent = self.match_acceptance.probabilities[kinds, lengths - 1]
        survival = given_parent.cumprod(axis=2, dtype=np.float64)
        return np.where((lengths[:, :, None] > 0) & (matches.tokens.numpy() >= 0), survival, 0.0)

    def _chains(self, sampled: Flags, chain: Tensor | None, shape: SearchShape) -> Flags:
        """[R] bool: the requests of which a single path is verified."""
        all_are = shape.beam_width == 1 or self.config.tree == "chain"
        return np.full_like(sampled, all_are) if all_are or chain is None else chain.numpy()

    def _candidates(
        self,
        states: States,
        root_tokens: Tensor,
        shape: SearchShape,
        matches: ContextMatches | None,
    ) -> DraftNodes:
        """What may be in the trees: of the search, and a column more for each path."""
        if shape.beam_length:
            found = self.explore(states, root_tokens, shape)
            allowed = candidate_log_probs(found, self.config.tree)
            nodes = found.tokens.numpy(), found.back_pointers.numpy(), allowed.numpy()
        else:
            none = np.zeros((len(root_tokens), 0, 0), dtype=np.int64)
            nodes = none, none, none.astype(np.float32)
        if matches is None:
            candidates = DraftNodes(*nodes, np.zeros(nodes[0].shape, dtype=np.int64))
        else:
            paths = matches.tokens.numpy(), matches.lengths.numpy()
            candidates = DraftNodes(*joined_nodes(*nodes, *paths))
        if self.recorder is not None:
            self.recorder.drafted(int(root_tokens[0]), candidates)
        return candidates
