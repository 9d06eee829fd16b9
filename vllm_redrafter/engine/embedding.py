"""The target's input embedding, which the drafter shares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

from torch import Tensor, nn
from vllm.lora.layers.vocab_parallel_embedding import VocabParallelEmbeddingWithLoRA

from vllm_redrafter.substitution import substituted


def shared_embedding(target: nn.Module) -> Callable[[Tensor], Tensor]:
    """The function from tokens [...] int64 to [..., H] that the target itself begins with.

    Adapters are left out of it. The drafter knows the target without them; and vLLM's layer for
    adapters expects the rows of the target's step, not a draft's.
    """
    embed = cast(Callable[[Tensor], Tensor], target.embed_input_ids)
    layers = [m for m in target.modules() if isinstance(m, VocabParallelEmbeddingWithLoRA)]
    if not layers:
        return embed

    def embed_without_adapters(tokens: Tensor) -> Tensor:
        with ExitStack() as bare:
            for layer in layers:
                bare.enter_context(substituted(layer, "forward", layer.base_layer.forward))
            return embed(tokens)

    return embed_without_adapters
