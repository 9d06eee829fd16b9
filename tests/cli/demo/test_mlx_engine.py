# SPDX-License-Identifier: Apache-2.0
"""The demo on mlx-lm, with a small target and a drafter that knows its answers."""

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from redrafter_testing.models.reciting_target import ANSWERS, make_reciting_pair
from vllm_redrafter.cli.demo import mlx_engine, smollm2
from vllm_redrafter.cli.demo.decoding import DecodingJob
from vllm_redrafter.cli.demo.engine_worker import Decoded, Round
from vllm_redrafter.cli.demo.prompts import PROMPTS
from vllm_redrafter.mlx import load_drafter
from vllm_redrafter.utils.errors import ConfigError

pytest.importorskip("mlx.core")

from vllm_redrafter.cli.demo.mlx_engine import MLXEngine, usual_dtype


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_reciting_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def decoded(pair: tuple[Path, Path]) -> Iterator[tuple[Decoded, Decoded]]:
    """Plainly, and with the drafter."""
    target, drafter = pair
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = smollm2.prompts_of(tokenizer, target, [*ANSWERS])
    finished: list[int] = []
    results = []
    # A busy machine's times might say that drafts do not pay.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(mlx_engine, "load_drafter", partial(load_drafter, adaptive=False))
    for speculation in (None, {"model": str(drafter), "context_matches": 0}):
        job = DecodingJob(str(target), speculation, prompts, 40, [1], 512)
        asked = Round(prompts, 40, in_flight=1)
        results.append(MLXEngine(job).decode(asked, lambda: finished.append(1)))
    monkeypatch.undo()
    assert len(finished) == 2 * len(prompts)
    yield results[0], results[1]


def test_answers_are_the_same_in_fewer_steps(decoded: tuple[Decoded, Decoded]) -> None:
    plain, drafted = decoded
    for one, other in zip(plain.answers, drafted.answers, strict=True):
        assert [t for step in one for t in step] == [t for step in other for t in step]
        assert {len(step) for step in one} == {1}
        assert 2 * len(other) < len(one)


def test_steps_are_counted_without_the_prompts(decoded: tuple[Decoded, Decoded]) -> None:
    plain, drafted = decoded
    assert plain.stats == {}
    steps = [step for answer in drafted.answers for step in answer[1:]]
    assert drafted.stats == {"sampled_tokens": sum(map(len, steps)), "verifications": len(steps)}


def test_more_requests_at_once_than_one_are_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"1 request at once, not \[1, 4\]"):
        MLXEngine(DecodingJob(str(pair[0]), None, [], 40, [1, 4], 512))


def test_the_demo_reports_mlx_lm_without_and_with_the_drafter(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=1000)
    smollm2.run_demo(tmp_path / "cache", *pair, console, backend="mlx")
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert f"Greedy decoding in mlx-lm, {usual_dtype()}" in output and "vLLM" not in output
    assert all(question in output for question in PROMPTS.values())
    assert "yes" in output and "target steps" in output
