# SPDX-License-Identifier: Apache-2.0
"""The drafter at work: from the last hidden states to the next step's token trees."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.drafting.proposer import Proposer
from vllm_redrafter.engine.cpu.heads.forms import packed_form
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.engine.embedding import shared_embedding
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.heads.head import Product, SearchHead
from vllm_redrafter.heads.shortlist import affordable
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape


class TreeProposer(Proposer[Tensor]):
    """vLLM's custom proposer (`method="custom_class"`), made by the model runner."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        settings = Settings.of(vllm_config)
        self.target_layers = settings.target_layers
        self.dtype = vllm_config.model_config.dtype
        self.drafter: SearchHead | None = None
        self.hidden_width = 0  # (1 + n) H, what a draft reads of each request
        self.checkpoint = settings.checkpoint()
        recorded = NOTHING_RECORDED if self.checkpoint is None else self.checkpoint.acceptance
        super().__init__(settings.config, self.checkpoint is not None, recorded)

    def load_model(self, target: nn.Module) -> None:
        """Read the checkpoint and pack it; the target's embedding is shared, not copied."""
        if self.checkpoint is not None:
            self.replacement(self.checkpoint)()
            self.hidden_width = self.checkpoint.head.hidden_width
            self.embed = shared_embedding(target)

    def replacement(self, checkpoint: Checkpoint) -> Callable[[], object]:
        """Read another one and pack it; returns what puts it in the drafter's place."""
        return partial(setattr, self, "drafter", packed_form(checkpoint.load(self.dtype), packed))

    def explore(self, states: Tensor, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """Search from `states` [R, (1 + n) H] and the last sampled tokens [R] int64."""
        assert self.drafter is not None
        ranked = self.drafter.config.num_ranked_tokens
        count = affordable(self.config.candidates, len(root_tokens), shape.beam_length, ranked)
        return search(self.drafter, self.embed, states, root_tokens, shape, count)


def packed(weight: Tensor, bias: Tensor | None = None) -> Product:
    """x [..., in] -> x W^T + b [..., out], on copies of W [out, in] and b [out] packed once."""
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(
        weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False
    )
    layer.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
    # vLLM says so itself where it cannot pack this dtype on this processor, and falls back.
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return lambda x: layer.cpu_linear(x, layer.weight, layer.bias)
