# SPDX-License-Identifier: Apache-2.0
"""The step as one text: its output is plain decoding's, and what engines use does the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from decoding_step import Node, Sample, Tree, ancestors, best_nodes, step
from decoding_step import beam_search as plain_search
from redrafter_testing.models.head_forms import random_head
from redrafter_testing.models.tiny_models import make_small_target
from redrafter_testing.shared_results import made_once
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.tree.beam_search import beam_search
from vllm_redrafter.tree.token_tree import TokenTree

VOCAB, PROMPT = 12, [3, 9, 5, 2, 6]
SHAPE = ReDrafterConfig(7, beam_width=3, beam_length=3)


class Llama:
    """See `decoding_step.Target`: transformers' model and cache."""

    def __init__(self, folder: Path, prompt: Sequence[int]) -> None:
        self.passes = 0
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.cache = DynamicCache()
        rows = len(prompt)
        self.forward([*prompt], [*range(rows)], torch.ones(rows, rows).tril().bool())

    def forward(
        self, tokens: list[int], positions: list[int], visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.rows, self.passes = len(tokens), self.passes + 1
        context = torch.ones(len(tokens), self.cache.get_seq_length(), dtype=torch.bool)
        mask = torch.cat([context, visible], dim=1)[None, None]
        found = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            attention_mask=torch.where(mask, 0.0, -torch.inf),
            past_key_values=self.cache,
            output_hidden_states=True,
        )
        return found.logits[0], found.hidden_states[-1][0]

    def keep(self, rows: list[int]) -> None:
        start = self.cache.get_seq_length() - self.rows
        kept = torch.tensor([*range(start), *(start + row for row in rows)])
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]

    def embed(self, token: int) -> Tensor:
        return self.model.get_input_embeddings().weight[token]


small_target = made_once(make_small_target, vocab_size=VOCAB)


def drafter_of(llama: Llama) -> DraftHead:
    """At random, and yet often right, as there are few tokens to choose from."""
    size = llama.model.config.hidden_size
    return random_head(RecurrentConfig(VOCAB, size, exit_dim=2 * size))


@torch.inference_mode()
def decoded(folder: Path, most: int, sample: Sample, shape: ReDrafterConfig | None) -> list[int]:
    """Tokens behind the prompt; without a shape by plain decoding."""
    llama, text = Llama(folder, PROMPT[:-1]), [*PROMPT]
    drafter = drafter_of(llama)
    tree: Tree = [Node(text[-1], 0, 0, 0.0)]
    while len(text) < len(PROMPT) + most:
        known = [*text]
        output, tree = step(
            llama,
            drafter,
            tree,
            len(text) - 1,
            shape or SHAPE,
            lambda logits, drawn, known=known: sample(logits, [*known, *drawn]),
        )
        text += output
        if shape is None:
            assert len(output) == 1
            tree = tree[:1]
    if shape == SHAPES[-1]:
        assert llama.passes < most, "it would prove nothing where no node is accepted"
    return text[len(PROMPT) :][:most]


SHAPES = [SHAPE, ReDrafterConfig(4, 1, 4), ReDrafterConfig(30, 8, 5)]


def seeded(logits: Tensor, text: Sequence[int]) -> int:
    """The noise of a position is the same whatever was drafted."""
    generator = torch.Generator().manual_seed(len(text))
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return int((logits.softmax(dim=0) / noise).argmax())


@pytest.mark.parametrize("sample", [lambda logits, _: int(logits.argmax()), seeded])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_output_is_plain_decodings(
    small_target: Path, shape: ReDrafterConfig, sample: Sample
) -> None:
    assert decoded(small_target, 40, sample, shape) == decoded(small_target, 40, sample, None)


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_is_searched_and_selected_as_one_request(
    small_target: Path, shape: ReDrafterConfig
) -> None:
    llama = Llama(small_target, PROMPT)
    drafter, requests = drafter_of(llama).double(), 3
    embedding = llama.model.get_input_embeddings().weight.double()
    hidden = torch.randn(requests, embedding.shape[1], dtype=torch.float64)
    roots = torch.arange(requests)
    width, length = shape.beam_width, shape.beam_length
    batch = beam_search(drafter, embedding.__getitem__, hidden, roots, width, length)
    trees = TokenTree.from_explored(roots, batch, shape.num_speculative_tokens)
    for request in range(requests):
        explored = plain_search(drafter, lambda t: embedding[t], hidden[request], request, shape)
        tree = best_nodes(explored, shape.num_speculative_tokens)
        count = int(trees.num_nodes[request])
        assert count == len(tree)
        assert [node.token for node in tree] == trees.tokens[request, :count].tolist()
        assert [node.parent for node in tree] == trees.parents[request, :count].tolist()
        assert [node.depth for node in tree] == trees.depths[request, :count].tolist()
        assert torch.equal(ancestors(tree), trees.ancestor_mask[request, :count, :count])
