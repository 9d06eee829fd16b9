# SPDX-License-Identifier: Apache-2.0
"""The grid and the costs; the replay itself is test_estimate.py's."""

import pytest
import torch

from redrafter_testing.models.cycle_language import HIDDEN_SIZE, VOCAB_SIZE, CycleTarget, rows
from redrafter_testing.models.training_data import answered
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.evaluation.evaluate import evaluate_shapes, shapes
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.utils.errors import ConfigError


def test_the_grid_has_the_shapes_that_a_search_can_fill() -> None:
    found = [
        (s.beam_width, s.beam_length, s.num_speculative_tokens)
        for s in shapes([1, 3], [2], [2, 6, 2])
    ]
    assert found == [(1, 2, 2), (3, 2, 2), (3, 2, 6)]
    with pytest.raises(
        ConfigError, match=r"no search of widths \[1\] and lengths \[2\] fills a tree of 9 nodes"
    ):
        shapes([1], [2], [9])
    with pytest.raises(ConfigError, match="fills a chain of 3 nodes"):
        shapes([3], [2], [3], "chain")
    with pytest.raises(ConfigError, match="beam_width must be at most 50"):
        shapes([51], [2], [2])


def test_a_step_costs_its_levels_and_its_nodes() -> None:
    config = EvaluationConfig(draft_cost=0.1, verify_cost=0.01)
    assert config.step_cost(ReDrafterConfig(12, 3, 5)) == pytest.approx(1 + 0.5 + 0.12)
    # With fewer nodes than levels the engine searches no deeper.
    assert config.step_cost(ReDrafterConfig(2, 3, 5)) == pytest.approx(1 + 0.2 + 0.02)
    with pytest.raises(ConfigError, match="evaluation: draft_cost must be at least 0, got -1"):
        EvaluationConfig(draft_cost=-1)


def test_dear_nodes_make_small_trees_the_best() -> None:
    torch.manual_seed(0)
    drafter = RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16)).eval()
    grid = shapes([1, 3], [2, 3], [2, 6])
    for cost, nodes in ((0.0, 6), (10.0, 2)):
        config = EvaluationConfig(draft_cost=0, verify_cost=cost)
        results = evaluate_shapes(drafter, CycleTarget(), rows(), grid, config)
        best = max(results, key=lambda result: result.speed_up)
        assert best.shape.num_speculative_tokens == nodes
        alone = estimate_acceptance(drafter, CycleTarget(), rows(), best.shape)
        assert best.acceptance == alone


def test_text_without_answers_cannot_be_evaluated() -> None:
    drafter = RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16))
    prompts = ListRows([answered([0, 1, 0, 2, 0, 3, 1, 4, 4, 2], [])])
    grid = shapes([1], [2], [2])
    with pytest.raises(ConfigError, match="has no answer of two tokens or more"):
        evaluate_shapes(drafter, CycleTarget(), prompts, grid, EvaluationConfig())
