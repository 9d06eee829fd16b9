# SPDX-License-Identifier: Apache-2.0
"""The target's input embedding, which the drafter shares."""

from __future__ import annotations

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

    Adapters are left out of it. The drafter knows the target without them; and vLLM's layer for
    adapters expects the rows of the target's step, not a draft's. So is what a target of images
    and text prepares for its own step while it embeds (Gemma 4's embeddings of each layer).
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
                bare.enter_context(patched(layer, "forward", layer.base_layer.forward))
            return embed(tokens)

    return embed_without_adapters


@torch.inference_mode()
def lookup_table(
    target: nn.Module, embed: Callable[[Tensor], Tensor]
) -> VocabParallelEmbedding | None:
    """The layer that `embed` looks rows of `weight` up in, if that is all it does.

    A kernel can read such a row where it needs it, without a launch before. Some targets scale
    what they look up, or have a part of the table on each rank: those are told by tokens from all
    over the vocabulary, whose embeddings are compared with rows; it waits for the device.

    Args:
        target: its weights have been loaded.
        embed: see `shared_embedding`.

    Returns:
        None where no layer's rows are the embeddings.
    """
    for layer in target.modules():
        if not isinstance(layer, VocabParallelEmbedding) or not _is_plain_table(layer):
            continue
        weight = layer.weight
        tokens = torch.linspace(0, layer.org_vocab_size - 1, 64, device=weight.device).long()
        embedded, rows = embed(tokens), weight[tokens]
        same = embedded.dtype == rows.dtype and torch.equal(embedded, rows)
        # Of zeros, a scale would not be told.
        if same and bool(rows.any()):
            return layer
    return None


def _is_plain_table(layer: VocabParallelEmbedding) -> bool:
    """Has it rows of numbers to read? A quantised layer has codes, and often no `weight` at all."""
    is_quantised = not isinstance(layer.quant_method, UnquantizedEmbeddingMethod)
    # An output layer that shares the embedding's rows is found as the embedding.
    return layer.tp_size == 1 and not is_quantised and not isinstance(layer, ParallelLMHead)
