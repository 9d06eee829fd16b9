# SPDX-License-Identifier: Apache-2.0
"""Tokens per target step: the replay of many answers against one answer at a time."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from redrafter_testing.models.cycle_language import CycleTarget
from redrafter_testing.models.tiny_models import make_small_target
from redrafter_testing.models.training_data import answered
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows, TextRow
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.estimate import (
    Acceptance,
    estimate_acceptance,
    estimate_chains,
    estimate_matches,
    estimate_stream,
)
from vllm_redrafter.replay.target import read_target
from vllm_redrafter.tree.beam_search import beam_search
from vllm_redrafter.tree.policy import search_shape
from vllm_redrafter.tree.token_tree import TokenTree

V = 11


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    folder = make_small_target(tmp_path_factory.mktemp("target"), V, hidden_size=16)
    return LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def written() -> ListRows:
    """Answers of different places and lengths: whole, short, one token, none, and two in a row."""
    tokens = torch.randint(V, (6, 14), generator=torch.Generator().manual_seed(1))
    generated = torch.zeros_like(tokens, dtype=torch.bool)
    generated[0, 3:] = generated[1, 2:9] = generated[2, 5:6] = generated[4, 1:13] = True
    generated[5, 2:7] = generated[5, 9:] = True
    return ListRows(map(TextRow, tokens, generated))


def naive_acceptance(
    drafter: RecurrentHead, target: LlamaForCausalLM, config: ReDrafterConfig
) -> Acceptance:
    """One answer at a time; the tree is walked by looking for the child with the next token."""
    embed, steps, tokens = target.get_input_embeddings(), 0, 0
    by_depth = [0] * config.beam_length
    for row in written():
        hidden = read_target(target, TextBatch.of([[row]])).hidden[0]
        marks = "".join("01"[mark] for mark in row.generated.tolist())
        for first, last in ((run.start(), run.end() - 1) for run in re.finditer("1+", marks)):
            root = first
            while root < last:
                node, accepted = 0, 0
                root_token, budget = row.tokens[root].unsqueeze(0), config.num_speculative_tokens
                given = hidden[root - 1].unsqueeze(0), root_token
                explored = beam_search(drafter, embed, *given, *search_shape(config, budget))
                tree = TokenTree.from_explored(root_token, explored, budget, tree=config.tree)
                while (following := root + accepted + 1) <= last:
                    matching = (tree.parents[0] == node) & (tree.tokens[0] == row.tokens[following])
                    children = matching[: int(tree.num_nodes[0])].nonzero().flatten().tolist()
                    if not [child for child in children if child]:
                        break
                    node, accepted = max(children), accepted + 1
                    by_depth[accepted - 1] += 1
                output = min(accepted + 1, last - root)
                steps, tokens, root = steps + 1, tokens + output, root + output
    return Acceptance(steps, tokens, tuple(by_depth))


@pytest.mark.parametrize(
    "config",
    [
        ReDrafterConfig(1, beam_width=1, beam_length=1, context_matches=0),
        ReDrafterConfig(2, beam_width=3, beam_length=4, context_matches=0),
        ReDrafterConfig(6, beam_width=3, beam_length=3, context_matches=0),
        ReDrafterConfig(20, beam_width=6, beam_length=4, context_matches=0),
        ReDrafterConfig(9, beam_width=4, beam_length=4, tree="beams", context_matches=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("draft_vocab_size", [None, 7])
def test_replay_is_that_of_one_answer_at_a_time(
    target: LlamaForCausalLM, config: ReDrafterConfig, draft_vocab_size: int | None
) -> None:
    torch.manual_seed(5)
    sizes = RecurrentConfig(V, 16, exit_dim=8, draft_vocab_size=draft_vocab_size)
    drafter = RecurrentHead(sizes).eval()
    if draft_vocab_size:
        drafter.keep_tokens(torch.tensor([0, 1, 4, 5, 7, 8, 10]))
    expected = naive_acceptance(drafter, target, config)
    for batch_size in (2, 64):
        assert estimate_acceptance(drafter, target, written(), config, batch_size) == expected
    # Every answer's tokens after its first one are output by some step.
    assert expected.tokens == 10 + 6 + 0 + 0 + 11 + 4 + 4
    assert expected.by_depth[0] > 0


def test_without_a_drafter_what_the_text_went_on_with_before_is_accepted() -> None:
    """The text is `a b c a x a b c a`, answered from x on."""
    a, b, c, x = range(4)
    text = ListRows([answered([a, b, c, a], [x, a, b, c, a])])
    config = ReDrafterConfig(8, context_matches=1)
    # x is new; `a` went on with x just before, not with b; `a b` went on with `c a`.
    assert estimate_matches(text, config, V) == Acceptance(3, 4, (1, 1, *[0] * 6))
    both = replace(config, context_matches=2)
    # `a` went on with `b c a` too.
    assert estimate_matches(text, both, V) == Acceptance(2, 4, (1, 1, 1, *[0] * 5))


def test_matches_of_own_text_and_of_the_blocks_before_are_accepted_beside_the_draft() -> None:
    """A drafter that knows nothing, and answers of the same eight tokens, twice."""
    torch.manual_seed(5)
    drafter, target = RecurrentHead(RecurrentConfig(8, 16, exit_dim=8)).eval(), CycleTarget()
    text = ListRows([answered([0], [2, 3, 4, 5, 6, 7, 1, 0] * 2)] * 4)
    found = estimate_stream(drafter, target, text, ReDrafterConfig(8, 2, 2), block=2)
    # Two rows a block. Seven tokens are new, and the others follow the 0 of the prompt.
    assert found["own text"] == [Acceptance(16, 30, (2,) * 8)] * 2
    # After three tokens: `0 2 3`, whose path ends with its answer, and then `1 0 2`.
    first, second = found["own text, earlier answers"]
    assert first == found["own text"][0] and (second.steps, second.tokens) == (6, 30)
    own, both = found["drafter, own text"][1], found["drafter, own text, earlier answers"][1]
    assert both.steps <= second.steps < own.steps <= 16 < found["drafter"][1].steps


def test_runner_ups_and_matches_are_accepted_beside_a_chain(target: LlamaForCausalLM) -> None:
    torch.manual_seed(5)
    drafter = RecurrentHead(RecurrentConfig(V, 16, exit_dim=8)).eval()
    found = estimate_chains(drafter, target, written(), [ReDrafterConfig(9, 3, 3)])
    alone = ReDrafterConfig(9, 1, 3, context_matches=0)
    chain, matched = (
        estimate_acceptance(drafter, target, written(), config)
        for config in (alone, replace(alone, context_matches=2))
    )
    assert found["chain"] == [chain] and found["chain, matches"] == [matched]
    # A runner-up that is accepted ends the step.
    beside = found["chain, runner-ups"][0]
    of_tree = estimate_acceptance(drafter, target, written(), replace(alone, beam_width=3))
    assert chain.by_depth[0] / chain.steps < beside.by_depth[0] / beside.steps
    assert of_tree.steps < beside.steps < chain.steps
    assert found["chain, runner-ups, matches"][0].steps < min(beside.steps, matched.steps)


def test_rows_follow_each_other_and_count_positions_anew() -> None:
    blocks = [[answered([5, 6], [8]), answered([7], [9])], [answered([7], [9, 3, 4])]]
    batch = TextBatch.of(blocks, min_length=6)
    assert batch.tokens.tolist() == [[5, 6, 8, 7, 9, 0], [7, 9, 3, 4, 0, 0]]
    assert batch.generated.int().tolist() == [[0, 0, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]
