"""The drafter at work: from the last hidden states to the next step's token trees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_redrafter.budget.choice import Flags, Terms
from vllm_redrafter.checkpoints.reading import load_drafter, recorded_acceptance
from vllm_redrafter.engine.cpu.acceptance_model import AcceptanceModel
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.ranking import best_trees, selected_nodes
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.engine.embedding import shared_embedding
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape, candidate_log_probs, search_shape
from vllm_redrafter.tree.token_tree import TokenTree

Floats = npt.NDArray[np.float32]


class Draft(NamedTuple):
    """Trees of what R requests are to verify, and what their nodes are expected to be worth.

    Attributes:
        tree: with K + 1 slots whatever the search, so that trees of different steps can be
            verified together.
        log_odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the
            root.
        survival: [R, K+1] float32, the probability that each node is accepted; 1 for the root, 0
            in unused slots.
        explored: [R, L, W] float32, the same of all that the search visited.
        expected: the tokens of those requests that verify something.
    """

    tree: TokenTree
    log_odds: Floats
    survival: Floats
    explored: Floats
    expected: float


class TreeProposer:
    """vLLM's custom proposer (`method="custom_class"`), made by the model runner.

    Attributes:
        config: the most that is drafted.
        target_layers: that the drafter reads beside the last hidden state.
        recorded: how its nodes were accepted where the drafter was measured.
        acceptance: how probable a node is to be accepted, learned by whoever judges the drafts.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        settings = Settings.of(vllm_config)
        self.model, self.revision = settings.model, settings.revision
        self.config = settings.config
        self.target_layers = settings.target_layers
        self.dtype = vllm_config.model_config.dtype

    def load_model(self, target: nn.Module) -> None:
        """Read the checkpoint and pack it; the target's embedding is shared, not copied."""
        self.drafter = load_drafter(self.model, self.dtype, self.revision).packed(packed)
        self.recorded = recorded_acceptance(self.model, self.revision)
        self.acceptance = AcceptanceModel(self.config.beam_length, self.recorded)
        self.embed = shared_embedding(target)

    def propose(
        self,
        hidden: Tensor,
        root_tokens: Tensor,
        chain: Tensor | None,
        most: npt.NDArray[np.int64],
    ) -> TokenTree:
        """Draft trees for R requests, their nodes ranked by the draft's own probabilities.

        Args:
            hidden: [R, (1 + n) H], the target's hidden state that predicted each root token, then
                those of its n `target_layers`.
            root_tokens: [R] int64.
            chain: [R] bool, requests that need a chain; None where none does.
            most: [R], the most nodes of each request, at most K; somewhere above 0.

        Returns:
            Trees with K + 1 slots whatever the step's limit, so that trees of different steps
            can be verified together.
        """
        found = self.explore(hidden, root_tokens, search_shape(self.config, int(most.max())))
        candidates = candidate_log_probs(found, self.config.tree, chain)
        *arrays, _ = selected_nodes(
            root_tokens.numpy(),
            found.tokens.numpy(),
            found.back_pointers.numpy(),
            candidates.numpy(),
            most,
            self.config.num_speculative_tokens,
        )
        return TokenTree(*map(torch.from_numpy, arrays))

    def propose_best(
        self,
        hidden: Tensor,
        root_tokens: Tensor,
        chain: Tensor | None,
        most: npt.NDArray[np.int64],
        sampled: Flags,
        shape: SearchShape,
        terms: Terms,
    ) -> Draft:
        """Draft by a given search those nodes that are worth verifying.

        Args:
            hidden, root_tokens, chain, most: see `propose`.
            sampled: [R] bool, requests that sample; the others take the most probable token.
            shape: the search.
            terms: what verifying costs and is worth.
        """
        found = self.explore(hidden, root_tokens, shape)
        candidates = candidate_log_probs(found, self.config.tree, chain)
        *tree, log_odds, survival, explored, expected = best_trees(
            root_tokens.numpy(),
            found.tokens.numpy(),
            found.back_pointers.numpy(),
            found.log_probs.numpy(),
            candidates.numpy(),
            sampled,
            self.acceptance.slopes,
            self.acceptance.biases,
            most,
            self.config.num_speculative_tokens,
            *terms,
        )
        return Draft(
            TokenTree(*map(torch.from_numpy, tree)), log_odds, survival, explored, expected
        )

    def explore(self, hidden: Tensor, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """The candidates for trees that continue the roots."""
        return search(self.drafter, self.embed, hidden, root_tokens, shape)
