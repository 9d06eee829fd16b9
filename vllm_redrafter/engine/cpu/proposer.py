"""The drafter at work: from the last hidden states to the next step's token trees."""

from __future__ import annotations

from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_redrafter.beam_search import beam_search
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.engine.cpu.packed_drafter import PackedDrafter
from vllm_redrafter.engine.embedding import shared_embedding
from vllm_redrafter.engine.settings import Settings
from vllm_redrafter.policy import search_shape
from vllm_redrafter.token_tree import TokenTree


class TreeProposer:
    """vLLM's custom proposer (`method="custom_class"`), made by the model runner."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        settings = Settings.of(vllm_config)
        self.model, self.revision = settings.model, settings.revision
        self.config = settings.config
        self.dtype = vllm_config.model_config.dtype

    def load_model(self, target: nn.Module) -> None:
        """Read the checkpoint and pack it; the target's embedding is shared, not copied."""
        self.drafter = PackedDrafter(load_drafter(self.model, self.dtype, self.revision))
        self.embed = shared_embedding(target)

    def propose(
        self, hidden: Tensor, root_tokens: Tensor, chain: Tensor | None, max_nodes: int
    ) -> TokenTree:
        """Draft trees for R requests.

        Args:
            hidden: [R, H], the target's hidden state that predicted each root token.
            root_tokens: [R] int64.
            chain: [R] bool, requests that need a chain; None where none does.
            max_nodes: how many nodes the scheduler wants in this step, at most K.

        Returns:
            Trees with K + 1 slots whatever the step's wish, so that trees of different steps
            can be verified together.
        """
        config = self.config
        width, length = search_shape(config, max_nodes)
        explored = beam_search(self.drafter, self.embed, hidden, root_tokens, width, length)
        slots = config.num_speculative_tokens
        tree = TokenTree.from_explored(root_tokens, explored, slots, config.tree, chain)
        return tree.prefix(max_nodes + 1)
