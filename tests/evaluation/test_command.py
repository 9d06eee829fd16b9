# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: what it prints, writes, records and refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redrafter_testing.models.small_trainings import SHAPE, VOCAB_SIZE, job, run
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.models.training_data import write_data
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
    assert "4 rows" in result.output and "If a draft level costs 0.02" in result.output
    assert "assumed and not measured" in " ".join(result.output.split())
    figures = json.loads((tmp_path / "figures.json").read_text())
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
    assert figures["tokens_per_step_with_matches"] >= figures["tokens_per_step_of_matches_alone"]
    assert figures["tokens_per_step_of_matches_alone"] > 1


def test_evaluate_reads_all_folders_that_train_held_out_of(
    target: Path, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_data(other, target, num=12, max_tokens=20, seed=9)
    asked = replace(job(target, data, tmp_path / "drafter"), data=(data, other))
    trained, _ = run(asked)
    figures = tmp_path / "figures.json"
    command = ["evaluate", str(target), str(asked.output), "--held-out=4", f"--json={figures}"]
    command += [f"--data={data}", f"--data={other}"]
    grid = [f"--beam-widths={SHAPE.beam_width}", f"--beam-lengths={SHAPE.beam_length}"]
    nodes = f"--spec-tokens={SHAPE.num_speculative_tokens}"
    result = CliRunner().invoke(app, [*command, *grid, nodes])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(figures.read_text())["results"]
    assert found["tokens_per_step"] == pytest.approx(trained.acceptance.tokens_per_step)


def test_evaluate_records_the_shape_that_it_recommends(
    target: Path, data: Path, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter", vocab_size=VOCAB_SIZE)
    before = read_config(str(drafter))
    command = ["evaluate", str(target), str(drafter), f"--data={data}", "--beam-widths=2,3"]
    figures = f"--json={tmp_path / 'figures.json'}"
    grid = ["--beam-lengths=2,3", "--spec-tokens=3,6", "--verify-cost=1"]
    plain = CliRunner().invoke(app, [*command, *grid])
    assert plain.exit_code == 0 and read_config(str(drafter)) == before
    result = CliRunner().invoke(app, [*command, *grid, figures, "--record"])
    assert result.exit_code == 0, result.output
    assert f"recorded in {drafter / 'config.json'}" in "".join(result.output.split("\n"))

    shapes = json.loads((tmp_path / "figures.json").read_text())["results"]
    best = max(shapes, key=lambda shape: shape["speed_up"])
    expected = ReDrafterConfig(
        best["num_speculative_tokens"], best["beam_width"], best["beam_length"]
    )
    served, _ = validated(Request({"model": str(drafter)}))
    assert served == expected
    served, _ = validated(Request({"model": str(drafter), "beam_length": 9, "tree": "beams"}))
    assert served == replace(expected, beam_length=9, tree="beams")
    after = read_config(str(drafter))
    recorded = acceptance_of(after)
    assert recorded.greedy is not None and recorded.sampled is None, "the data is greedy"
    size = len(recorded.greedy.survival), len(recorded.greedy.survival[0])
    assert size == (expected.beam_length, expected.beam_width)
    del after["acceptance"]
    for entry in ("proposal_methods", "default_proposal_method"):
        del after["speculators_config"][entry]
    assert after == before


def test_a_shape_that_cannot_be_recorded_is_said_before_anything_is_evaluated() -> None:
    command = ["evaluate", "no-target", "org/drafter", "--data=none", "--record"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "--record: 'org/drafter' is not a folder" in result.stderr


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_evaluated(
    option: str, tmp_path: Path
) -> None:
    missing = tmp_path / "missing" / "file"
    command = ["evaluate", "/no/target", "/no/drafter", "--data=/no/data", f"{option}={missing}"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert f"{option} {str(missing)!r} cannot be written: No such file or" in result.stderr
