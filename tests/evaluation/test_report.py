# SPDX-License-Identifier: Apache-2.0
"""An evaluation's figures: printed, written and drawn."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.evaluation.evaluate import RANKS, Evaluation, ShapeResult
from vllm_redrafter.evaluation.report import draw_heat_map, print_evaluation, write_json
from vllm_redrafter.replay.estimate import Acceptance
from vllm_redrafter.utils.errors import ConfigError

WORSE = ShapeResult(ReDrafterConfig(2, 1, 2), Acceptance(100, 125, (20, 5)), cost=1.05)
BEST = ShapeResult(ReDrafterConfig(6, 3, 2), Acceptance(100, 187, (60, 27)), cost=1.07)


@pytest.fixture
def found() -> Evaluation:
    accuracy = torch.tensor([[0.5, 0.625, 0.75, 1.0], [0.25] * len(RANKS)])
    matches = {"with_matches": Acceptance(100, 243), "matches_alone": Acceptance(100, 138)}
    return Evaluation([WORSE, BEST], EvaluationConfig(), accuracy, **matches)


def test_the_tables_have_all_shapes_and_the_best_is_recommended(found: Evaluation) -> None:
    console = Console(file=io.StringIO(), width=150)
    print_evaluation(console, found)
    printed = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    for figure in ("1.25", "1.87", "0.20 0.05", "0.60 0.27", "0.625"):
        assert figure in printed
    assert "--spec-tokens 6, beam_width 3, beam_length 2 (1.87 tokens per step" in printed
    assert "of this shape: 1.87; with 2 continuations" in printed
    assert "(context_matches): 2.43; of these alone, without a drafter: 1.38." in printed


def test_all_figures_are_written(found: Evaluation, tmp_path: Path) -> None:
    write_json(found, tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [each["tokens_per_step"] for each in figures["results"]] == [1.25, 1.87]
    assert [each["num_speculative_tokens"] for each in figures["results"]] == [2, 6]
    assert figures["tokens_per_step_with_matches"] == 2.43
    assert figures["tokens_per_step_of_matches_alone"] == 1.38
    assert figures["top_accuracy"]["top-2"] == [0.625, 0.25]
    with pytest.raises(ConfigError, match=r"--json .* cannot be written"):
        write_json(found, tmp_path / "none" / "figures.json")


def test_a_heat_map_is_drawn(found: Evaluation, tmp_path: Path) -> None:
    draw_heat_map(found, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"--plot .* cannot be written"):
        draw_heat_map(found, tmp_path / "none" / "map.png")
