# SPDX-License-Identifier: Apache-2.0
"""Where answers leave plain decoding's, and what counts as sound."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from first_gpu_parts import parity
from first_gpu_parts.parity import differences, is_sound, outcome

from vllm_redrafter import ReDrafterConfig


def answer(tokens: list[int], *logprobs: dict[str, float]) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": list(logprobs)}


PLAIN = [
    answer([5, 6, 7], {"5": -0.1}, {"6": -0.5, "9": -0.7}, {"7": -0.1}),
    answer([1, 2]),
    answer([3, 4]),
]


def test_of_each_answer_the_first_difference_is_told() -> None:
    first, second = differences(PLAIN, [answer([5, 9, 8]), answer([1]), answer([3, 4])])
    assert (first["request"], first["position"]) == (0, 1)
    assert first["gap"] == pytest.approx(0.2)
    assert second == {"request": 1, "position": 1, "gap": None}
    (improbable,) = differences(PLAIN[:1], [answer([8, 6, 7])])
    assert improbable == {"request": 0, "position": 0, "gap": None}


def test_an_engine_s_outcome_counts_equal_answers() -> None:
    found = {"answers": {"greedy": [answer([5, 6, 7]), answer([1, 3])]}, "accepted": 12}
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
    from vllm_redrafter import load_drafter

    target, drafter = parity.write_models(tmp_path)
    sizes = json.loads(Path(target, "config.json").read_text())
    config = load_drafter(drafter).config
    assert (config.vocab_size, config.hidden_size) == (sizes["vocab_size"], sizes["hidden_size"])
