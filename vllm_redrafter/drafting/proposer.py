# SPDX-License-Identifier: Apache-2.0
"""From a search's nodes to the trees that are verified: joined with n-gram matches, ranked, cut."""

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.budget.choice import Flags, VerifyCosts, verify_everything
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.acceptance_model import AcceptanceModel, MatchAcceptance
from vllm_redrafter.drafting.joining import DraftNodes, joined_nodes
from vllm_redrafter.drafting.ranking import best_trees
from vllm_redrafter.drafting.recorder import DraftRecorder
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.policy import MATCHES, SearchShape, candidate_log_probs, search_shape
from vllm_redrafter.tree.token_tree import TokenTree

Floats = npt.NDArray[np.float32]
States = TypeVar("States")
"""What a search begins with: hidden states, as the engine has them."""


class Draft(NamedTuple):
    """Trees of what R requests are to verify, and what their nodes are expected to be worth.

    Attributes:
        tree: with K + 1 slots whatever the search.
        log_odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the
            root, -inf for nodes of matches alone.
        match_classes: [R, K+1] int64, of nodes on paths; 0 for others.
        survival: [R, K+1] float32, the probability that each node is accepted; 1 for the root, 0
            in unused slots.
        explored: [R, L, W] float32, the same of all that the search visited.
        expected: the tokens of those requests that verify something.
        tokens_per_second: of the step, by the costs given.
    """

    tree: TokenTree
    log_odds: Floats
    match_classes: npt.NDArray[np.int64]
    survival: Floats
    explored: Floats
    expected: float
    tokens_per_second: float


class Proposer(ABC, Generic[States]):
    """Proposes trees for the requests of one engine.

    Attributes:
        config: the most that is drafted.
        searches: there is a drafter; without one, drafts are of n-gram matches alone.
        recorded: how its nodes were accepted where the drafter was measured.
        acceptance, match_acceptance: how probable nodes are to be accepted.
        recorder: records each draft's nodes; None but for `trace`.
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
        """Search what continues the roots [R] int64, from the target's states of R requests."""

    def shape(self, max_nodes: int) -> SearchShape:
        """The search for a step that verifies at most so many nodes per request."""
        return search_shape(self.config, max_nodes) if self.searches else MATCHES

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
            states, root_tokens: see `explore`.
            chain: [R] bool, requests that need a chain; None where none does.
            max_nodes: [R], the most nodes of each request, at most K; somewhere above 0.
            sampled: [R] bool, requests that sample; the others take the most probable token.
            shape: the search.
            verify_costs: what verifying costs. None to verify as many nodes as there may be, ranked
                by the draft's own probabilities.
            matches: of their texts; None without prompt lookup.
        """
        nodes = self._draft_nodes(states, root_tokens, shape, matches)
        all_nodes = self.config.num_speculative_tokens
        slopes, biases = self.acceptance.slopes, self.acceptance.biases
        if verify_costs is None:
            slopes, biases = np.ones_like(slopes), np.zeros_like(biases)
            verify_costs = verify_everything(len(root_tokens) * (all_nodes + 1))
        all_are = shape.beam_width == 1 or self.config.tree == "chain"
        chains = np.full_like(sampled, all_are) if all_are or chain is None else chain.numpy()
        *tree, log_odds, match_classes, survival, explored, expected, rate = best_trees(
            root_tokens.numpy(),
            nodes,
            sampled,
            (slopes, biases, self.match_acceptance.probabilities),
            max_nodes,
            all_nodes,
            verify_costs,
            chains,
        )
        if self.recorder is not None:
            self.recorder.drafted(int(root_tokens[0]), nodes, expected)
        of_search = explored[:, : shape.beam_length, : shape.beam_width]
        trees = TokenTree(*map(torch.from_numpy, tree))
        return Draft(trees, log_odds, match_classes, survival, of_search, expected, rate)

    def _draft_nodes(
        self,
        states: States,
        root_tokens: Tensor,
        shape: SearchShape,
        matches: ContextMatches | None,
    ) -> DraftNodes:
        if shape.beam_length:
            explored = self.explore(states, root_tokens, shape)
            allowed = candidate_log_probs(explored, self.config.tree)
            nodes = explored.tokens.numpy(), explored.back_pointers.numpy(), allowed.numpy()
        else:
            none = np.zeros((len(root_tokens), 0, 0), dtype=np.int64)
            nodes = none, none, none.astype(np.float32)
        if matches is None:
            return DraftNodes(*nodes, np.zeros(nodes[0].shape, dtype=np.int64))
        paths = matches.tokens.numpy(), matches.classes.numpy()
        return DraftNodes(*joined_nodes(*nodes, *paths))
