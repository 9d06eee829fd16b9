# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: what it prints, writes, records and refuses."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redrafter_testing.models.small_trainings import VOCAB_SIZE, job, run
from redrafter_testing.models.tiny_models import make_drafter
from vllm_redrafter.checkpoints.acceptance import acceptance_of
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.cli.main import app
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.speculative_config import Request, validated

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_evaluate_prints_writes_and_draws(target: Path, data: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    run(job(target, data, drafter))
    shutil.rmtree(drafter / "checkpoints")
    files = [f"--plot={tmp_path / 'map.png'}", f"--json={tmp_path / 'figures.json'}"]
    grid = ["--beam-widths=1,2", "--beam-lengths=2,3", "--spec-tokens=2,6"]
    command = ["evaluate", str(target), str(drafter), f"--data={data}", "--held-out=4"]
    result = CliRunner().invoke(app, [*command, *grid, *files])
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
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
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    # What train says of its held-out conversations, evaluate says of the same ones.
    trained = read_config(str(drafter))["training"]["result"]["tokens_per_step"]
    assert figures["results"][-1]["tokens_per_step"] == pytest.approx(trained)
    assert figures["costs"] == {"assumed": {"draft": 0.02, "verify": 0.005}}
    alone = figures["tokens_per_step_of_matches_alone"]
    assert figures["tokens_per_step_with_matches"] >= alone > 1
    assert f"without a drafter: {alone:.2f}." in printed


def test_evaluate_records_the_shape_that_it_recommends(
    target: Path, data: Path, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter", vocab_size=VOCAB_SIZE)
    before = read_config(str(drafter))
    command = ["evaluate", str(target), str(drafter), f"--data={data}", "--beam-widths=2,3"]
    figures = f"--json={tmp_path / 'figures.json'}"
    grid = ["--beam-lengths=2,3", "--spec-tokens=3,6", "--verify-cost=1"]
    result = CliRunner().invoke(app, [*command, *grid, figures, "--record"])
    assert result.exit_code == 0, result.output
    assert f"recorded in {drafter / 'config.json'}" in "".join(result.output.split("\n"))

    shapes = json.loads((tmp_path / "figures.json").read_text())["results"]
    best = max(shapes, key=lambda shape: shape["speed_up"])
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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--record", "--record: 'org/drafter' is not a folder"),
        ("--json=/no/folder/file", "--json '/no/folder/file' cannot be written: No such file or"),
        ("--plot=/no/folder/file", "--plot '/no/folder/file' cannot be written: No such file or"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_evaluated(
    option: str, message: str
) -> None:
    result = CliRunner().invoke(app, ["evaluate", "none", "org/drafter", "--data=none", option])
    assert result.exit_code == 1 and message in result.stderr
