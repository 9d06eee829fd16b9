"""Where answers leave plain decoding's, and what counts as sound."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from first_gpu_parts import parity
from first_gpu_parts.parity import Answer, Difference, differences, is_sound, outcome

from vllm_redrafter import ReDrafterConfig

PLAIN = [
    Answer([5, 6, 7], [{"5": -0.1}, {"6": -0.5, "9": -0.7}, {"7": -0.1}]),
    Answer([1, 2], []),
    Answer([3, 4], []),
]


def test_of_each_answer_the_first_difference_is_told() -> None:
    answers = [Answer([5, 9, 8], []), Answer([1], []), Answer([3, 4], [])]
    first, second = differences(PLAIN, answers)
    assert (first.request, first.position) == (0, 1)
    assert first.gap == pytest.approx(0.2)
    assert second == Difference(1, 1, None)


def test_a_token_that_plain_decoding_held_for_improbable_has_no_known_gap() -> None:
    (found,) = differences(PLAIN[:1], [Answer([8, 6, 7], [])])
    assert found == Difference(0, 0, None)


def test_an_engine_s_outcome_counts_equal_answers() -> None:
    answers = [{"tokens": [5, 6, 7], "logprobs": []}, {"tokens": [1, 3], "logprobs": []}]
    found = {"answers": {"greedy": answers}, "accepted": 12}
    told = outcome(found, "error", {"greedy": PLAIN[:2]})
    (compared,) = told["agreement"].values()
    assert (compared["equal"], compared["of"]) == (1, 2)
    assert compared["differences"] == [{"request": 1, "position": 1, "gap": None}]
    assert outcome(found, "error", {})["agreement"] == {}
    assert outcome(None, None, {"greedy": PLAIN})["checks"] is None


def engines(**changed: Any) -> dict[str, Any]:
    agreement = {"greedy": {"equal": 8, "of": 8, "differences": []}}
    sound = {"checks": "error", "accepted": 50, "agreement": agreement}
    return {"plain": {**sound, "accepted": None}, "fixed": {**sound, **changed}}


def apart(gap: float | None) -> dict[str, Any]:
    differences = [{"request": 0, "position": 4, "gap": gap}]
    return {"greedy": {"equal": 7, "of": 8, "differences": differences}}


@pytest.mark.parametrize(
    ("changed", "sound"),
    [
        ({}, True),
        ({"checks": "warn"}, False),
        ({"checks": None, "accepted": None, "agreement": {}}, False),
        ({"accepted": 3}, False),
        ({"agreement": apart(0.01)}, False),
        ({"agreement": apart(None)}, False),
    ],
    ids=["all well", "checks failed", "engine failed", "no drafts", "a near-tie", "another answer"],
)
def test_what_is_sound(changed: dict[str, Any], sound: bool) -> None:
    assert is_sound(engines(**changed)) == sound


@pytest.mark.parametrize(("gap", "sound"), [(0.01, True), (0.3, False), (None, False)])
def test_in_float16_near_ties_are_let_pass(gap: float | None, sound: bool) -> None:
    assert is_sound(engines(agreement=apart(gap)), parity.NEAR_TIE) == sound


def fake_engine(modes: list[str], fails_at: set[str]) -> Callable[..., SimpleNamespace]:
    """In the place of subprocess.run: an engine that fails where vLLM's checks are these."""

    def run(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        job = json.loads(Path(command[-1]).read_text())
        mode = job["arguments"]["jit_monitor_mode"]
        assert job["sampling"] == ["greedy"]
        assert env["VLLM_GPU_SYNC_CHECK"] == mode
        modes.append(mode)
        if mode in fails_at:
            return SimpleNamespace(returncode=1)
        Path(job["answers"]).write_text('{"answers": {}, "accepted": 1}')
        return SimpleNamespace(returncode=0)

    return run


@pytest.mark.parametrize(
    ("fails_at", "modes", "passed"),
    [
        (set(), ["error"], "error"),
        ({"error"}, ["error", "warn"], "warn"),
        ({"error", "warn"}, ["error", "warn"], None),
    ],
)
def test_an_engine_that_fails_the_checks_is_started_again_with_warnings(
    fails_at: set[str],
    modes: list[str],
    passed: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(subprocess, "run", fake_engine(started, fails_at))
    found, checks = parity.answers_of("fixed", {"dtype": "float16"}, tmp_path)
    assert (started, checks) == (modes, passed)
    assert (found is None) == (passed is None)


def test_all_engines_are_at_work_at_once_and_each_is_reported_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last to be done is plain decoding, without which nothing can be compared."""
    at_once = threading.Barrier(2, timeout=30)
    drafted = threading.Event()
    answer = {"tokens": [3, 4], "logprobs": []}

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        job = json.loads(Path(command[-1]).read_text())
        at_once.wait()
        if "speculative_config" not in job["arguments"]:
            assert drafted.wait(timeout=30)
        found = {"answers": {"greedy": [answer]}, "accepted": 12}
        Path(job["answers"]).write_text(json.dumps(found))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    reports = []
    names = [parity.PLAIN, "fixed"]
    for answered in parity.answers_of_all(names, tmp_path, half=True):
        reports.append(parity.outcomes(names, answered))
        drafted.set()
    first, last = reports
    assert first == {"fixed": {"checks": "error", "accepted": 12, "agreement": {}}}
    assert list(last) == names
    assert last["fixed"]["agreement"]["greedy"] == {"equal": 1, "of": 1, "differences": []}
    assert is_sound(last)


def test_the_engines_are_given_shapes_that_the_package_takes() -> None:
    assert "speculative_config" not in parity.engine_arguments("plain", "t", "d")
    for engine in parity.DRAFTING:
        shape = parity.engine_arguments(engine, "t", "d")["speculative_config"]
        assert shape.pop("model") == "d"
        assert ReDrafterConfig(**shape).adaptive == (engine == "adaptive")


def test_vllm_knows_the_engines_arguments_and_both_checks() -> None:
    pytest.importorskip("vllm")
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for engine in (parity.PLAIN, *parity.DRAFTING):
        for half in (False, True):
            assert known >= parity.engine_arguments(engine, "t", "d", half).keys()
    assert "jit_monitor_mode" in known
    assert "VLLM_GPU_SYNC_CHECK" in envs.environment_variables


def test_the_tiny_pair_fits_together(tmp_path: Path) -> None:
    from first_gpu_parts.models import write_drafter, write_target

    from vllm_redrafter import load_drafter

    target = json.loads((write_target(tmp_path / "t") / "config.json").read_text())
    config = load_drafter(str(write_drafter(tmp_path / "d"))).config
    assert (config.vocab_size, config.hidden_size) == (target["vocab_size"], target["hidden_size"])
