# SPDX-License-Identifier: Apache-2.0
"""The target's input embedding, which the drafter shares."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models import supports_multimodal

from vllm_redrafter.utils.patching import patched


def shared_embedding(target: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function from tokens [...] int64 to [..., H] that the target itself begins with.

    Without adapters, whose layers expect the rows of a step, and without what a multimodal target
    prepares for its own step while it embeds.
    """
    text: Any = target
    if supports_multimodal(target):
        text = text.get_language_model()
    embed = cast(Callable[[Tensor], Tensor], text.embed_input_ids)
    layers = [m for m in target.modules() if isinstance(m, VocabParallelEmbeddingWithLoRA)]
    if not layers:
        return embed

    def embed_without_adapters(tokens: Tensor) -> Tensor:
        with ExitStack() as bare:
            for layer in layers:
                bare.enter_context(patched(layer, forward=layer.base_layer.forward))
            return embed(tokens)

    return embed_without_adapters


@torch.inference_mode()
def lookup_table(
    target: nn.Module, embed: Callable[[Tensor], Tensor]
) -> VocabParallelEmbedding | None:
    """The loaded layer whose rows of `weight` are what `embed` returns; None if there is none.

    A kernel can read such rows itself. Rows that are scaled, or on other ranks, show by comparing
    the embeddings of some tokens, which waits for the device.
    """
    for layer in target.modules():
        # An output layer that shares the embedding's rows is found as the embedding.
        if not isinstance(layer, VocabParallelEmbedding) or isinstance(layer, ParallelLMHead):
            continue
        if layer.tp_size > 1 or not isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            continue
        weight = layer.weight
        tokens = torch.linspace(0, layer.org_vocab_size - 1, 64, device=weight.device).long()
        embedded, rows = embed(tokens), weight[tokens]
        same = embedded.dtype == rows.dtype and torch.equal(embedded, rows)
        # Of zeros, a scale would not show.
        if same and bool(rows.any()):
            return layer
    return None
