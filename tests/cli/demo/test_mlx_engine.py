# SPDX-License-Identifier: Apache-2.0
"""The demo on mlx-lm, with a small target and a drafter that knows its answers."""

import io
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from rich.console import Console

from redrafter_testing.models.reciting_target import ANSWERS, make_reciting_pair
from vllm_redrafter.cli.demo import mlx_engine, smollm2
from vllm_redrafter.cli.demo.engine import Job, Round
from vllm_redrafter.data.target import Target
from vllm_redrafter.mlx import load_drafter

pytest.importorskip("mlx.core")

from vllm_redrafter.cli.demo.mlx_engine import decode_in_mlx, usual_dtype


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_reciting_pair(tmp_path_factory.mktemp("pair"))


def test_answers_are_the_same_in_fewer_steps(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair
    prompts = smollm2.prompts_of(Target.open(target), [*ANSWERS])
    # A busy machine's times might say that drafts do not pay.
    fixed = partial(load_drafter, adaptive=False, context_matches=0)
    monkeypatch.setattr(mlx_engine, "load_drafter", fixed)
    plain, drafted = (
        next(decode_in_mlx(Job(str(target), speculation, "float32", [Round(prompts, 40, 1)])))
        for speculation in (None, {"model": str(drafter)})
    )
    assert len(plain.answers) == len(prompts)
    for one, other in zip(plain.answers, drafted.answers, strict=True):
        assert [*chain(*one)] == [*chain(*other)]
        assert {len(step) for step in one} == {1}
        assert 2 * len(other) < len(one)


def test_the_demo_reports_mlx_lm_without_and_with_the_drafter(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    file = io.StringIO()
    console = Console(file=file, width=1000)
    smollm2.run_demo(tmp_path / "cache", *map(str, pair), console, backend="mlx")
    output = file.getvalue()
    assert f"Greedy decoding in mlx-lm, {usual_dtype()}" in output and "vLLM" not in output
    assert all(question in output for question in smollm2.PROMPTS)
    assert "yes" in output and "target steps" in output
