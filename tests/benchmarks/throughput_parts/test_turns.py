# SPDX-License-Identifier: Apache-2.0
"""Engines take turns: in which order they measure, and that the others are paused meanwhile."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from throughput_parts import turns
from throughput_parts.engine import Case, Job
from throughput_parts.methods import Method
from throughput_parts.process import EngineError, EngineProcess
from throughput_parts.turns import Entry, in_turns, start_all

from redrafter_testing.benchmarks import fake_engine
from redrafter_testing.benchmarks.throughput_runs import fake_job


def entry(folder: Path, label: str, cases: list[Case], **behaviour: str) -> Entry:
    """One with a fake engine in a process of its own."""
    method = Method("ReDrafter", label, None)
    return Entry(method, cases, fake_job(folder, **behaviour))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_engine.install(tmp_path, monkeypatch)


def test_engines_take_turns_while_the_others_are_paused(folder: Path) -> None:
    one, two = Case(1, 0.0), Case(2, 0.0)
    entries = [entry(folder, label, [one, two]) for label in ("a", "b")]
    entries.append(entry(folder, "c", [two]))
    shown: list[str] = []

    def update(description: str = "", advance: int = 0) -> None:
        shown.append(description.removeprefix("ReDrafter "))

    with ExitStack() as stack:
        engines = start_all(entries, {}, stack, update)
        shown.clear()
        repeats = [in_turns(entries, engines, update, repeat) for repeat in range(2)]

    turns = "".join(shown)
    assert turns == "ab" + "bca" + "ba" + "cab", "case by case, each begun by another method"
    for runs in repeats:
        assert [run.concurrency for run in runs["ReDrafter a"]] == [1, 2]
        assert [run.concurrency for run in runs["ReDrafter c"]] == [2]
        seen = [measured.spec_decode for method in runs.values() for measured in method]
        assert seen == [{"others": 4, "all_stopped": True}] * 5  # two processes each
    assert fake_engine.all_gone(folder)


def test_engines_that_measure_while_they_start_do_not_meet_the_others_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry(folder, label, [Case(1, 0.0)]) for label in ("a", "c", "b", "d")]
    for at in (1, 3):
        method = replace(entries[at].method, name="adaptive")
        entries[at] = replace(entries[at], method=method)
    happened: list[str] = []

    class Recorded(EngineProcess):
        def __init__(self, job: Job, variables: dict[str, str]) -> None:
            happened.append(next(each.method.shape for each in entries if each.job is job))
            super().__init__(job, variables)

    monkeypatch.setattr(turns, "EngineProcess", Recorded)
    monkeypatch.setattr(turns, "sleep", lambda seconds: happened.append(f"{seconds:.0f} s"))

    def update(description: str) -> None:
        happened.append(description)

    with ExitStack() as stack:
        engines = start_all(entries, {}, stack, update, at_once=True)
        assert happened == [
            *("start of ReDrafter a, ReDrafter b, adaptive c", "a", "b"),
            *(f"{turns.HEAD_START:.0f} s", "c"),
            *("start of adaptive d", "d"),
        ]
        runs = in_turns(entries, engines, lambda **_: None, repeat=0)
    assert all(run.spec_decode["all_stopped"] for (run,) in runs.values())
    assert fake_engine.all_gone(folder)


def test_when_one_engine_fails_the_paused_ones_end(folder: Path) -> None:
    cases = [Case(1, 0.0)]
    entries = [entry(folder, "a", cases), entry(folder, "b", cases, dies="start")]
    with pytest.raises(EngineError, match="no such model"), ExitStack() as stack:
        start_all(entries, {}, stack, lambda **_: None)
    assert len(list(folder.iterdir())) == 4, "two processes each"
    assert fake_engine.all_gone(folder)
