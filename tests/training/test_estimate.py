"""Tokens per target step: the replay of many answers against one answer at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_redrafter.beam_search import beam_search
from vllm_redrafter.config import DrafterConfig, ReDrafterConfig
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.token_tree import TokenTree
from vllm_redrafter.training.data import TokenBlocks
from vllm_redrafter.training.estimate import Acceptance, estimate_acceptance
from vllm_redrafter.training.target import read_target

V = 11


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def blocks() -> TokenBlocks:
    """Answers of different places and lengths: whole, short, one token, and none."""
    tokens = torch.randint(V, (5, 14), generator=torch.Generator().manual_seed(1))
    generated = torch.zeros_like(tokens, dtype=torch.bool)
    generated[0, 3:] = generated[1, 2:9] = generated[2, 5:6] = generated[4, 1:13] = True
    return TokenBlocks(tokens, generated)


def naive_acceptance(
    drafter: Drafter, target: LlamaForCausalLM, blocks: TokenBlocks, config: ReDrafterConfig
) -> Acceptance:
    """One answer at a time; the tree is walked by looking for the child with the next token."""
    steps = tokens = 0
    for row in range(len(blocks)):
        text, answer = blocks.tokens[row], blocks.generated[row].nonzero().flatten().tolist()
        if not answer:
            continue
        hidden = read_target(target, text.unsqueeze(0)).hidden[0]
        root = answer[0]
        while root < answer[-1]:
            node, accepted = 0, 0
            tree = search(drafter, target, hidden[root - 1], text[root], config)
            while True:
                following = root + accepted + 1
                child = find_child(tree, node, int(text[following])) if following < 14 else None
                if child is None or following > answer[-1]:
                    break
                node, accepted = child, accepted + 1
            output = min(accepted + 1, answer[-1] - root)
            steps, tokens, root = steps + 1, tokens + output, root + output
    return Acceptance(steps, tokens)


def search(
    drafter: Drafter,
    target: LlamaForCausalLM,
    hidden: Tensor,
    root_token: Tensor,
    config: ReDrafterConfig,
) -> TokenTree:
    root_tokens, embed = root_token.unsqueeze(0), target.get_input_embeddings()
    explored = beam_search(
        drafter, embed, hidden.unsqueeze(0), root_tokens, config.beam_width, config.beam_length
    )
    return TokenTree.from_explored(
        root_tokens, explored, config.num_speculative_tokens, tree=config.tree
    )


def find_child(tree: TokenTree, node: int, token: int) -> int | None:
    for child in range(1, int(tree.num_nodes[0])):
        if int(tree.parents[0, child]) == node and int(tree.tokens[0, child]) == token:
            return child
    return None


@pytest.mark.parametrize(
    "config",
    [
        ReDrafterConfig(num_speculative_tokens=1, beam_width=1, beam_length=1),
        ReDrafterConfig(num_speculative_tokens=6, beam_width=3, beam_length=3),
        ReDrafterConfig(num_speculative_tokens=20, beam_width=6, beam_length=4),
        ReDrafterConfig(num_speculative_tokens=9, beam_width=4, beam_length=4, tree="beams"),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [2, 64])
def test_replay_is_that_of_one_answer_at_a_time(
    target: LlamaForCausalLM, config: ReDrafterConfig, batch_size: int
) -> None:
    torch.manual_seed(5)
    drafter = Drafter(DrafterConfig(V, 16, exit_dim=8)).eval()
    expected = naive_acceptance(drafter, target, blocks(), config)
    assert estimate_acceptance(drafter, target, blocks(), config, batch_size) == expected
    # Every answer's tokens after its first one are output by some step.
    assert expected.tokens == 10 + 6 + 0 + 0 + 11


def test_hidden_state_is_what_lm_head_reads(target: LlamaForCausalLM) -> None:
    outputs = read_target(target, blocks().tokens)
    torch.testing.assert_close(target.lm_head(outputs.hidden), outputs.logits)


def test_no_steps_count_as_plain_decoding() -> None:
    assert Acceptance(steps=0, tokens=0).tokens_per_step == 1.0
