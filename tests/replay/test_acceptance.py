# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a drafter's acceptance: which nodes count, and what is made of them."""

import pytest
import torch

from redrafter_testing.models.cycle_language import CycleTarget, rows
from vllm_redrafter.budget.acceptance import log_odds_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.replay.acceptance import JudgedNodes, fitted, judged_nodes, measure_acceptance
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.tree.beam_search import ExploredNodes

SHAPE = ReDrafterConfig(9, beam_width=3, beam_length=3, context_matches=0)


def test_nodes_are_judged_where_their_parent_was_accepted_and_the_text_goes_on() -> None:
    explored = ExploredNodes(
        tokens=torch.tensor([[[5, 6], [7, 8], [9, 9]]]).repeat(3, 1, 1),
        log_probs=torch.zeros(3, 3, 2).log_softmax(dim=2).cumsum(dim=1),
        back_pointers=torch.tensor([[[0, 0], [1, 0], [0, 1]]]).repeat(3, 1, 1),
    )
    # 6 is the second beam, whose child at the next level is the first one, 7.
    found = judged_nodes(explored, torch.tensor([[6, 7, 1], [6, -1, -1], [4, 7, 9]]))
    assert found.judged.int().tolist() == [
        [[1, 1], [1, 0], [1, 0]],
        [[1, 1], [0, 0], [0, 0]],
        [[1, 1], [0, 0], [0, 0]],
    ]
    assert found.accepted.int().tolist() == [
        [[0, 1], [1, 0], [0, 0]],
        [[0, 1], [0, 0], [0, 0]],
        [[0, 0], [0, 0], [0, 0]],
    ]


def test_the_calibration_is_the_one_that_the_nodes_were_drawn_by() -> None:
    generator = torch.Generator().manual_seed(0)
    given_parent = torch.rand(20_000, 2, 1, generator=generator).log()
    log_probs, back_pointers = given_parent.cumsum(dim=1), torch.zeros(20_000, 2, 1).long()
    log_odds = log_odds_of(log_probs, back_pointers)
    probable = torch.sigmoid(0.7 * log_odds + torch.tensor([0.4, -0.8])[:, None])
    drawn = torch.rand(probable.shape, generator=generator) < probable
    judged = torch.cat([torch.ones_like(drawn[:, :1]), drawn[:, :1]], dim=1)
    accepted = drawn.cumprod(dim=1).bool()
    record = fitted(JudgedNodes(log_probs, back_pointers, judged, accepted))
    assert record.slope == pytest.approx(0.7, abs=0.03)
    assert record.biases == pytest.approx((0.4, -0.8), abs=0.06)
    shares = accepted.float().mean(dim=0).flatten().tolist()
    assert [level[0] for level in record.survival] == pytest.approx(shares, abs=0.01)


def test_either_kind_of_text_has_a_record_of_its_own() -> None:
    torch.manual_seed(3)
    drafter, target = RecurrentHead(RecurrentConfig(8, 16, exit_dim=8)).eval(), CycleTarget()
    text = rows()
    sampled = torch.arange(len(text)) % 2 == 1
    both = measure_acceptance(drafter, target, text, sampled, SHAPE)
    assert both.greedy is not None and both.sampled is not None and both.greedy != both.sampled
    assert measure_acceptance(drafter, target, text, torch.ones(20).bool(), SHAPE).greedy is None
    alone = measure_acceptance(drafter, target, text, torch.zeros(20).bool(), SHAPE)
    assert alone.sampled is None and alone.greedy is not None
    # One node of the first level is accepted where its tree's first token is.
    acceptance = estimate_acceptance(drafter, target, text, SHAPE)
    first = acceptance.by_depth[0] / acceptance.steps
    assert sum(alone.greedy.survival[0]) == pytest.approx(first, abs=0.02)
