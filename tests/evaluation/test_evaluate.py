# SPDX-License-Identifier: Apache-2.0
"""The grid and the costs; the replay itself is test_estimate.py's."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig

from redrafter_testing.models.cycle_language import HIDDEN_SIZE, VOCAB_SIZE, CycleTarget, rows
from redrafter_testing.models.small_trainings import VOCAB_SIZE as SMALL_VOCAB_SIZE
from redrafter_testing.models.training_data import answered
from vllm_redrafter import save_drafter
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.evaluation.evaluate import (
    RANKS,
    Evaluation,
    EvaluationJob,
    evaluate,
    evaluate_shapes,
    shapes,
    top_accuracy,
)
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.replay.target import read_target
from vllm_redrafter.utils.errors import ConfigError


def evaluated(config: EvaluationConfig) -> Evaluation:
    torch.manual_seed(0)
    drafter = RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16)).eval()
    quiet = Console(file=io.StringIO())
    grid = shapes([1, 3], [2, 3], [2, 6])
    return evaluate_shapes(drafter, CycleTarget(), rows(), grid, config, quiet)


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


def test_each_shape_is_replayed_by_itself() -> None:
    found = evaluated(EvaluationConfig())
    torch.manual_seed(0)
    drafter = RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16)).eval()
    for result in found.results:
        alone = estimate_acceptance(drafter, CycleTarget(), rows(), result.shape)
        assert result.acceptance == alone
    assert found.accuracy.shape == (3, len(RANKS))


def test_dear_nodes_make_small_trees_the_best() -> None:
    free, dear = (
        evaluated(EvaluationConfig(draft_cost=0, verify_cost=cost)).best.shape
        for cost in (0.0, 10.0)
    )
    assert dear.num_speculative_tokens == 2
    assert free.num_speculative_tokens == 6


def test_trees_are_of_the_kind_that_is_asked_for(target: Path, data: Path, tmp_path: Path) -> None:
    hidden_size = AutoConfig.from_pretrained(target).hidden_size
    drafter = RecurrentHead(RecurrentConfig(SMALL_VOCAB_SIZE, hidden_size, exit_dim=16))
    save_drafter(drafter, tmp_path)
    grid, config = shapes([2], [2], [2]), EvaluationConfig(tree="chain")
    job = EvaluationJob(str(target), str(tmp_path), (data,), grid, config)
    (result,) = evaluate(job).results
    assert result.shape.tree == "chain"


def test_top_accuracy_counts_the_drafters_own_predictions() -> None:
    """Against one row at a time; a drafter that ranks all tokens finds each among the best V."""
    torch.manual_seed(0)
    drafter, target = RecurrentHead(RecurrentConfig(8, 16, exit_dim=8)).eval(), CycleTarget()
    shares = top_accuracy(drafter, target, rows(), 3)
    assert shares.shape == (3, len(RANKS))
    assert (shares[:, -1] == 1).all()
    assert (shares[:, 0] <= shares[:, 1]).all()
    hits = total = 0
    for row in rows():
        outputs = read_target(target, TextBatch.of([[row]]))
        for start in range(4, len(row.tokens) - 2):
            condition = drafter.condition(outputs.hidden[0, start])
            state = drafter.start(condition, outputs.embedded[0, start + 1])
            logits = drafter.logits(condition, state, 0)
            hits += int(logits.argmax() == row.tokens[start + 2])
            total += 1
    assert shares[0, 0] == pytest.approx(hits / total)


def test_text_without_answers_cannot_be_evaluated() -> None:
    drafter = RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16))
    prompts = ListRows([answered([0, 1, 0, 2, 0, 3, 1, 4, 4, 2], [])])
    quiet = Console(file=io.StringIO())
    with pytest.raises(ConfigError, match="has no answer of two tokens or more"):
        evaluate_shapes(
            drafter, CycleTarget(), prompts, shapes([1], [2], [2]), EvaluationConfig(), quiet
        )
