# SPDX-License-Identifier: Apache-2.0
"""The embedding that a drafter shares with its target, and the table that kernels may read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from vllm_redrafter.engine.embedding import lookup_table, shared_embedding

VOCAB, HIDDEN = 96, 8


class Codes(QuantizeMethodBase):
    """Keeps weights as integers, as quantised checkpoints do."""

    def create_weights(self, layer: nn.Module, *sizes: Any, **rest: Any) -> None:
        codes = torch.randint(-8, 8, (layer.num_embeddings_padded, HIDDEN), dtype=torch.int8)
        layer.register_buffer("qweight", codes)

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def embedding(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        return layer.qweight[tokens].float()


class Target(nn.Module):
    """Its output layer comes first, as `modules` has them."""

    def __init__(self, embed: nn.Module, head: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.lm_head, self.embed_tokens, self._scale = head, embed, scale

    def embed_input_ids(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded if self._scale == 1.0 else embedded * self._scale


@pytest.fixture(autouse=True)
def configuration() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def layer(
    kind: type[VocabParallelEmbedding], method: QuantizeMethodBase | None = None
) -> VocabParallelEmbedding:
    """Of random weights, on one rank."""
    torch.manual_seed(0)
    made = kind(VOCAB, HIDDEN, disable_tp=True)
    nn.init.normal_(made.weight)
    if method is not None:
        del made.weight
        made.quant_method = method
        method.create_weights(made)
    return made


def table_of(target: Target) -> VocabParallelEmbedding | None:
    return lookup_table(target, shared_embedding(target))


def test_the_table_is_an_embedding_that_is_neither_quantised_nor_scaled() -> None:
    """Nor is it an output layer of the same rows, which are the embedding's until a reload."""
    embed, head = layer(VocabParallelEmbedding), layer(ParallelLMHead)
    assert torch.equal(embed.weight, head.weight)
    assert table_of(Target(embed, head)) is embed
    bare = layer(ParallelLMHead, Codes())
    assert table_of(Target(embed, bare)) is embed
    assert table_of(Target(embed, bare, scale=1.5)) is None
    assert table_of(Target(layer(VocabParallelEmbedding, Codes()), head)) is None


class Seeing(nn.Module):
    """A target that takes images: while it embeds, it prepares its next step."""

    supports_multimodal = True

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text, self.prepared = text, torch.zeros(4)

    def get_language_model(self) -> nn.Module:
        return self.text

    def embed_input_ids(self, tokens: Tensor) -> Tensor:
        self.prepared[: len(tokens)].copy_(tokens)
        return self.text.embed_input_ids(tokens)


def test_drafting_does_not_touch_what_a_target_prepares_for_its_own_step() -> None:
    """Nor does it matter whether a draft has more tokens than a step."""
    embed = layer(VocabParallelEmbedding)
    target = Seeing(Target(embed, layer(ParallelLMHead)))
    assert torch.equal(shared_embedding(target)(torch.arange(6)), embed.weight[:6])
    assert not target.prepared.any()
