"""The drafter at work: from the last hidden states to the next step's token trees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_redrafter.beam_search import ExploredNodes, beam_search
from vllm_redrafter.budget.calibration import AcceptanceEstimator, log_odds
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.engine.cpu.packed_drafter import PackedDrafter
from vllm_redrafter.engine.embedding import shared_embedding
from vllm_redrafter.engine.settings import Settings
from vllm_redrafter.policy import SearchShape, search_shape
from vllm_redrafter.token_tree import TokenTree, select_nodes


@dataclass(frozen=True)
class Draft:
    """Trees for R requests, and what their nodes are expected to be worth.

    Attributes:
        tree: with K + 1 slots whatever the search, so that trees of different steps can be
            verified together.
        odds: [R, K+1] float32, the draft's log-odds of each node given its parent; 0 for the root.
        survival: [R, K+1] float32, the probability that each node is accepted; 1 for the root, 0
            in unused slots.
        explored: [R, L, W] float32, the same of all that the search visited.
    """

    tree: TokenTree
    odds: Tensor
    survival: Tensor
    explored: Tensor


class TreeProposer:
    """vLLM's custom proposer (`method="custom_class"`), made by the model runner.

    Attributes:
        config: the most that is drafted.
        estimator: how probable a node is to be accepted, learned by whoever judges the drafts.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        settings = Settings.of(vllm_config)
        self.model, self.revision = settings.model, settings.revision
        self.config = settings.config
        self.dtype = vllm_config.model_config.dtype
        self.estimator = AcceptanceEstimator(self.config.beam_length)

    def load_model(self, target: nn.Module) -> None:
        """Read the checkpoint and pack it; the target's embedding is shared, not copied."""
        self.drafter = PackedDrafter(load_drafter(self.model, self.dtype, self.revision))
        self.embed = shared_embedding(target)

    def propose(
        self, hidden: Tensor, root_tokens: Tensor, chain: Tensor | None, max_nodes: int
    ) -> TokenTree:
        """Draft trees for R requests, their nodes ranked by the draft's own probabilities.

        Args:
            hidden: [R, H], the target's hidden state that predicted each root token.
            root_tokens: [R] int64.
            chain: [R] bool, requests that need a chain; None where none does.
            max_nodes: how many nodes the scheduler wants in this step, at most K.

        Returns:
            Trees with K + 1 slots whatever the step's wish, so that trees of different steps
            can be verified together.
        """
        explored = self.explore(hidden, root_tokens, search_shape(self.config, max_nodes))
        slots, kind = self.config.num_speculative_tokens, self.config.tree
        tree = TokenTree.from_explored(root_tokens, explored, slots, kind, chain)
        return tree.prefix(max_nodes + 1)

    def propose_ranked(
        self, hidden: Tensor, root_tokens: Tensor, chain: Tensor | None, shape: SearchShape
    ) -> Draft:
        """Draft by a given search, the nodes ranked by how probable they are to be accepted.

        Args:
            hidden, root_tokens, chain: see `propose`.
            shape: the search.
        """
        explored = self.explore(hidden, root_tokens, shape)
        odds = log_odds(explored.log_probs, explored.back_pointers)
        log_survival = self.estimator.log_survival(odds, explored.log_probs, explored.back_pointers)
        ranked = replace(explored, log_probs=log_survival)
        slots, kind = self.config.num_speculative_tokens, self.config.tree
        tree, index = select_nodes(root_tokens, ranked, slots, kind, chain)
        survival = log_survival.exp()

        def per_node(values: Tensor, root: float) -> Tensor:
            of_nodes = torch.nn.functional.pad(
                values.flatten(1).gather(1, index), (1, 0), value=root
            )
            return of_nodes.masked_fill(~tree.is_node, 0.0)

        return Draft(tree, per_node(odds, 0.0), per_node(survival, 1.0), survival)

    def explore(self, hidden: Tensor, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """The candidates for trees that continue the roots."""
        return beam_search(self.drafter, self.embed, hidden, root_tokens, *shape)
