"""Figures and goals, from known times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shared_parts.timing import Timing
from tree_attention_parts.report import (
    AttentionResult,
    Missing,
    StepResult,
    Verdict,
    judge,
)

from redrafter_testing.benchmarks.tree_attention_results import COPY, KEPT, STEPS_KEPT


def status(
    attention: list[AttentionResult], steps: list[StepResult] | None = None
) -> dict[str, Verdict]:
    """Verdicts by the goal's first word that tells them apart."""
    verdicts = judge(attention, steps or [], COPY)
    return dict(zip(("bandwidth", "nodes", "beams", "step"), verdicts, strict=True))


def test_bandwidth_is_the_floor_s_bytes_over_the_median() -> None:
    assert KEPT.gbps == pytest.approx(3600)
    assert status([KEPT])["bandwidth"].worst == "90% (llama-3-8b, batch 8, context 4096, nodes 32)"


def test_goals_met() -> None:
    found = status([KEPT, replace(KEPT, nodes="8x5")], [STEPS_KEPT])

    assert {name: verdict.status for name, verdict in found.items()} == dict.fromkeys(found, "met")
    assert found["nodes"].worst == "1.05 × (llama-3-8b, batch 8, context 4096, nodes 32)"
    assert found["beams"].worst == "4.50 × (llama-3-8b, batch 8, context 4096, nodes 8x5)"
    assert found["step"].worst == "15.0 µs (llama-7b, batch 8, nodes 8x5)"
    assert (found["bandwidth"].measured, found["nodes"].measured) == (2, 1)


@pytest.mark.parametrize(
    ("name", "worse"),
    [
        ("bandwidth", replace(KEPT, floor_bytes=319_000_000)),
        ("nodes", replace(KEPT, one_node=Timing([90.0]))),
        ("beams", replace(KEPT, nodes="8x5", beams=Timing([299.0]))),
    ],
)
def test_the_worst_case_decides(name: str, worse: AttentionResult) -> None:
    assert status([KEPT, replace(KEPT, nodes="8x5"), worse])[name].status == "missed"


@pytest.mark.parametrize("outside", [replace(KEPT, batch=4), replace(KEPT, context=2048)])
def test_cases_out_of_range_are_shown_but_do_not_decide(outside: AttentionResult) -> None:
    found = status([KEPT, replace(outside, tree=Timing([1000.0]))])

    assert found["bandwidth"].status == found["nodes"].status == "met"
    assert str(found["bandwidth"].elsewhere).startswith("9% (")
    assert str(found["nodes"].elsewhere).startswith("10.53 × (")


def test_a_failed_case_is_a_miss_and_no_case_is_neither() -> None:
    failed = replace(KEPT, batch=64, tree=Missing("failed: OutOfResources: shared memory"))
    found = status([KEPT, failed], [replace(STEPS_KEPT, batch=64)])

    assert (found["bandwidth"].status, found["bandwidth"].failed) == ("missed", 1)
    assert found["beams"].status == found["step"].status == "not measured"
