# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: the grid and the costs, what it prints, writes, records and refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from redrafter_testing.models.cycle_language import HIDDEN_SIZE, VOCAB_SIZE, CycleTarget, rows
from redrafter_testing.models.small_trainings import VOCAB_SIZE as TRAINED_VOCAB_SIZE
from redrafter_testing.models.small_trainings import job, run
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.models.training_data import answered
from redrafter_testing.own_commands import printed_by, refusal_of
from vllm_redrafter.checkpoints.acceptance import acceptance_of
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.engine.speculative_config import Request, validated
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.evaluation.evaluate import evaluate_shapes, shapes
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_the_grid_has_the_shapes_that_a_search_can_fill() -> None:
    sizes = (2, 1, 2), (2, 3, 2), (6, 3, 2)
    expected = [ReDrafterConfig(*size, context_matches=0) for size in sizes]
    assert shapes([1, 3], [2], [2, 6, 2]) == expected
    for grid, message in (
        (([1], [2], [9]), r"no search of widths \[1\] and lengths \[2\] fills a tree of 9 nodes"),
        (([3], [2], [3], "chain"), "fills a chain of 3 nodes"),
        (([51], [2], [2]), "beam_width must be at most 50"),
    ):
        with pytest.raises(ConfigError, match=message):
            shapes(*grid)


def test_a_step_costs_its_levels_and_its_nodes() -> None:
    config = EvaluationConfig(draft_cost=0.1, verify_cost=0.01)
    assert config.step_cost(ReDrafterConfig(12, 3, 5)) == pytest.approx(1 + 0.5 + 0.12)
    # With fewer nodes than levels the engine searches no deeper.
    assert config.step_cost(ReDrafterConfig(2, 3, 5)) == pytest.approx(1 + 0.2 + 0.02)
    with pytest.raises(ConfigError, match=r"^--draft-cost must be at least 0, got -1"):
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
        assert best.acceptance == estimate_acceptance(drafter, CycleTarget(), rows(), best.shape)


def test_text_without_answers_cannot_be_evaluated() -> None:
    drafter = RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16))
    prompts = ListRows([answered([0, 1, 0, 2, 0, 3, 1, 4, 4, 2], [])])
    grid = shapes([1], [2], [2])
    with pytest.raises(ConfigError, match="has no answer of two tokens or more"):
        evaluate_shapes(drafter, CycleTarget(), prompts, grid, EvaluationConfig())


def test_evaluate_prints_and_writes(target: Path, data: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    run(job(target, data, drafter))
    shutil.rmtree(drafter / "checkpoints")
    grid = ["--beam-widths=1,2", "--beam-lengths=2,3", "--spec-tokens=2,6", "--stream=2"]
    command = ["evaluate", str(target), str(drafter), f"--data={data}", "--held-out=4", "--trunk"]
    printed = printed_by(*command, *grid, f"--json={tmp_path / 'figures.json'}")
    assert "4 rows" in printed and "If a draft level costs 0.02" in printed
    assert "assumed and not measured" in printed
    figures = json.loads((tmp_path / "figures.json").read_text())
    best = max(figures["results"], key=lambda each: each["speed_up"])
    assert f"({best['tokens_per_step']:.2f} tokens per step, {best['speed_up']:.2f}×)" in printed
    shapes = [
        (r["beam_width"], r["beam_length"], r["num_speculative_tokens"]) for r in figures["results"]
    ]
    # A search of 2 x 2 or 1 x 3 has no 6 nodes.
    assert shapes == [(1, 2, 2), (1, 3, 2), (2, 2, 2), (2, 3, 2), (2, 3, 6)]
    # What train says of its held-out conversations, evaluate says of the same ones.
    trained = read_config(str(drafter))["training"]["result"]["tokens_per_step"]
    assert figures["results"][-1]["tokens_per_step"] == pytest.approx(trained)
    assert figures["costs"] == {"assumed": {"draft": 0.02, "verify": 0.005}}
    both, own, alone = (
        figures["tokens_per_step_with_matches"][name]
        for name in ("drafter, own text, earlier answers", "drafter, own text", "own text")
    )
    assert own["all"] >= alone["all"] > 1 and len(both["by_block"]) == 2
    assert both["by_block"][0] == own["by_block"][0]
    assert f"{both['all']:.2f} │ {both['second_half']:.2f}" in printed
    beside = figures["tokens_per_step_of_chains"]["chain, runner-ups, matches"]
    cells = " │ ".join(f"{figure:.2f}" for figure in beside.values())
    assert f"chain, runner-ups, matches │ {cells}" in printed


def test_evaluate_records_the_shape_that_it_recommends(
    target: Path, data: Path, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter", vocab_size=TRAINED_VOCAB_SIZE)
    before = read_config(str(drafter))
    command = ["evaluate", str(target), str(drafter), f"--data={data}", "--beam-widths=2,3"]
    figures = f"--json={tmp_path / 'figures.json'}"
    grid = ["--beam-lengths=2,3", "--spec-tokens=3,6", "--verify-cost=1"]
    printed = printed_by(*command, *grid, figures, "--record")
    assert f"recordedin{drafter / 'config.json'}" in printed.replace(" ", "")

    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["tokens_per_step_of_chains"] == {}, "nobody asked for them"
    best = max(written["results"], key=lambda shape: shape["speed_up"])
    size = best["num_speculative_tokens"], best["beam_width"], best["beam_length"]
    expected = ReDrafterConfig(*size)
    served, _ = validated(Request({"model": str(drafter)}))
    assert served == expected
    after = read_config(str(drafter))
    recorded = acceptance_of(after)
    assert recorded.greedy is not None and recorded.sampled is None, "the data is greedy"
    size = len(recorded.greedy.survival), len(recorded.greedy.survival[0])
    assert size == (expected.beam_length, expected.beam_width)
    added = {"acceptance", "speculators_config"}
    assert {k: v for k, v in after.items() if k not in added} == {
        k: v for k, v in before.items() if k not in added
    }


def test_what_cannot_be_written_is_refused_before_anything_is_evaluated() -> None:
    for option, message in (
        ("--record", "--record: 'redrafter:smollm2-135m-instruct' is not a folder"),
        ("--json=/no/folder/file", "--json '/no/folder/file' cannot be written: No such file or"),
    ):
        command = ["evaluate", "/", "redrafter:smollm2-135m-instruct", "--data=/", option]
        assert message in refusal_of(*command)
