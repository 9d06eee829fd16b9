"""benchmarks/throughput.py: what it accepts, what it writes; and all of it once."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import throughput
from throughput_parts import turns
from throughput_parts.engine import Case, Job, Run
from throughput_parts.methods import NGRAM

from redrafter_testing import process_trees
from redrafter_testing.benchmarks.throughput_runs import PARTS, run
from redrafter_testing.models.tiny_models import add_tokenizer, make_drafter, make_target

SCRIPT = Path(throughput.__file__)
ASK = "--suite math --no-chat"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(target)
    return target, make_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--temperature 0", "one of --dataset and --suite"),
        ("--suite chat --dataset b.txt", "one of --dataset and --suite"),
        ("--suite chat poems", "--suite poems: expected one of chat, summary, code, math, or all"),
        ("--suite chat", "no chat template; --no-chat asks in bare text"),
        ("--suite chat --no-chat --max-tokens 511", "chat: no prompt fits"),
        ("--dataset nowhere.txt", "nowhere.txt: no such file"),
        (f"{ASK} --shape 2x4", "'2x4': expected WxL:K"),
        (f"{ASK} --adaptive 4x5", "'4x5': expected WxL:K"),
        (f"{ASK} --context-matches 5", "expected an integer from 0 to 4"),
        (f'{ASK} --method {{"method":"suffix"}}', "num_speculative_tokens must be an integer"),
        (f"{ASK} --method ngram", "not JSON"),
        (f"{ASK} --prompts-per-request 0", "expected an integer of at least 1"),
        (f"{ASK} --concurrency 0", "expected an integer of at least 1"),
        (f"{ASK} --temperature -1", "expected a number of at least 0"),
        (f"{ASK} --temperature nan", "expected a number of at least 0"),
        (f"{ASK} --engine-args [1]", "expected a JSON object"),
        (f"{ASK} --engine-args {{", "not JSON"),
        (f"{ASK} --output nowhere/a.json", "its folder does not exist"),
        (f"{ASK} --drafter /nowhere", "no such folder"),
        (f"{ASK} --model /nowhere", "--model /nowhere"),
        (f"{ASK} --max-tokens 600", "no prompt fits"),
        (f"{ASK} --max-tokens 8 --min-tokens 9", "--min-tokens 9 is more than"),
    ],
)
def test_bad_input_ends_before_any_engine_starts(
    arguments: str,
    message: str,
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(turns, "EngineProcess", lambda *_: pytest.fail("an engine starts"))
    model, drafter = map(str, models)
    with pytest.raises(SystemExit) as ended:
        throughput.main(["--model", model, "--drafter", drafter, *arguments.split()])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@dataclass
class CannedEngine:
    """An engine without a process, which measures unless it is paused."""

    job: Job
    events: list[str]
    running: bool = True

    def __enter__(self) -> CannedEngine:
        self.events.append(f"start {self.job.seed}")
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("end")

    def wait_until_started(self) -> None: ...

    def measure(self, case: Case) -> Run:
        assert self.running
        self.events.append("measure")
        parts = PARTS if self.job.timed_parts else None
        answered = self.job.prompts_at(case)
        return run(1.0, [[1] * 9 for _ in answered], parts=parts, **asdict(case))

    def pause(self) -> None:
        self.running = False

    def resume(self) -> None:
        self.running = True


def without_engines(monkeypatch: pytest.MonkeyPatch, is_cpu: bool) -> list[str]:
    """Have canned engines started, on a machine of that kind; returns what happens to them."""
    pytest.importorskip("vllm")
    platform = SimpleNamespace(is_cpu=lambda: is_cpu, get_device_name=lambda: "a GPU")
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    events: list[str] = []
    monkeypatch.setattr(turns, "EngineProcess", lambda job, _: CannedEngine(job, events))
    return events


@pytest.mark.parametrize("is_cpu", [True, False])
def test_from_arguments_to_files_without_an_engine(
    is_cpu: bool,
    tmp_path: Path,
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    events = without_engines(monkeypatch, is_cpu)
    output = tmp_path / "out.json"
    arguments = ["--model", str(models[0]), "--drafter", str(models[1]), "--repeats", "2"]
    dataset = tmp_path / "prompts.txt"
    dataset.write_text("name\nvalue\n")
    arguments += ["--dataset", str(dataset), "--concurrency", "1", "4"]
    arguments += ["--shape", "1=2x4:6", "4=1x3:3", "--output", str(output)]
    arguments += ["--random-drafter", "--plain-again", "--prompts-per-request", "2"]

    throughput.main(arguments)

    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path.parent) not in text, "a results file must not hold this machine's paths"
    starts = [event for event in events if event.startswith("start")]
    if is_cpu:  # all of the seven engines at once
        assert events[:7] == starts == ["start 0"] * 7 and events[-7:] == ["end"] * 7
    else:
        assert starts == ["start 0"] * 7 + ["start 1"] * 7
        assert events.index("end") < events.index("start 0", 1), "two engines at a time"
    # Two levels, at each ReDrafter has one shape; two temperatures, but for n-grams on CPUs.
    rows = 2 * 2 * 2 + 2 * (1 if is_cpu else 2) + 3 * 2 * 2
    assert len(report["rows"]) == rows
    assert {m["concurrency"]: m["requests"] for m in report["measurements"]} == {1: 2, 4: 4}
    (adaptive, *_) = [row for row in report["rows"] if row["method"] == "adaptive"]
    assert adaptive["over_fixed"] == [1, 1, 1]
    assert len(report["measurements"]) == 2 * rows
    assert {row["task"] for row in report["rows"] + report["measurements"]} == {None}
    assert report["settings"]["num_prompts"] == 4  # two prompts, repeated to fill concurrency 4
    assert report["machine"]["gpu"] == (None if is_cpu else "a GPU")
    assert is_cpu or not report["settings"]["environment"]["LD_PRELOAD"]
    printed = capsys.readouterr().out
    assert all(f"{name}" in printed for name in ("ReDrafter 2x4:6", "random drafter 4x5:12"))


@pytest.mark.parametrize("is_cpu", [True, False])
def test_suites_are_measured_by_task_and_in_total(
    is_cpu: bool,
    tmp_path: Path,
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    events = without_engines(monkeypatch, is_cpu)
    output = tmp_path / "out.json"
    arguments = ["--model", str(models[0]), "--drafter", str(models[1]), "--no-chat"]
    arguments += ["--suite", "math", "code", "--num-prompts", "5", "--concurrency", "1", "2"]
    arguments += ["--temperature", "0", "--repeats", "1", "--output", str(output)]
    arguments += ["--context-matches", "2", "--matches-alone", "--method"]
    arguments += [json.dumps(NGRAM | {"num_speculative_tokens": 7})]
    draft_model = {"method": "draft_model", "model": str(models[0]), "num_speculative_tokens": 3}
    arguments += [json.dumps(draft_model)]

    throughput.main(arguments)

    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path.parent) not in text, "a results file must not hold this machine's paths"
    assert events.count("measure") == 6 * 2 * 2, "methods, levels and tasks"
    assert list(dict.fromkeys((row["method"], row["shape"]) for row in report["rows"])) == [
        ("plain", ""),
        ("ngram", "7"),
        ("draft_model", f"{models[0].name}, 3"),
        ("matches alone", "12"),
        ("ReDrafter", "2x4:6, matches 2"),
        ("adaptive", "4x5:12, matches 2"),
    ]
    assert report["settings"]["suite"] == ["math", "code"]
    assert report["settings"]["num_prompts"] == 10, "five of each task"
    found = [row for row in report["rows"] if row["method"] == "ReDrafter"]
    assert [(row["concurrency"], row["task"], row["requests"]) for row in found] == [
        (level, task, requests)
        for level in (1, 2)
        for task, requests in (("math", 5), ("code", 5), (None, 10))
    ]
    assert all(row["identical"] == row["requests"] for row in found)
    (total,) = [
        m
        for m in report["measurements"]
        if (m["method"], m["concurrency"], m["task"]) == ("plain", 2, None)
    ]
    assert (total["seconds"], total["output_tokens"]) == (2.0, 90)
    printed = capsys.readouterr()
    assert "math: 5 prompts" in printed.err and " total " in printed.out


@pytest.mark.engine
def test_four_methods_through_real_engines(tmp_path: Path, models: tuple[Path, Path]) -> None:
    output, dataset = tmp_path / "out.json", tmp_path / "prompts.txt"
    dataset.write_text("name:value1\nlist:[7]\nvalue:[14]\n")
    options = (
        "--dtype float32 --repeats 1 --concurrency 2 --temperature 0 "
        '--max-tokens 24 --ignore-eos --engine-args {"enforce_eager":true} '
        "--adaptive 2x4:8 --context-matches 2 --matches-alone --method"
    )
    command = [sys.executable, str(SCRIPT), "--model", str(models[0]), "--drafter", str(models[1])]
    ended = process_trees.run(
        [*command, *options.split(), "--dataset", dataset, "--output", output],
        timeout=400,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # a third of vLLM's imports
    )
    assert ended.returncode == 0, ended.stderr

    report = json.loads(output.read_text())
    assert {"vllm-redrafter", "torch"} <= set(report["versions"])
    assert report["machine"]["cpu"] and report["machine"]["cores"] and report["date"]
    plain, alone, redrafter, adaptive = report["measurements"]
    for measurement in (plain, alone, redrafter, adaptive):
        assert measurement["requests"] == 3 and measurement["output_tokens"] == 72
        assert measurement["seconds"] > 0
    assert (plain["method"], plain["request_steps"], plain["identical"]) == ("plain", 72, None)
    assert (redrafter["method"], redrafter["identical"]) == ("ReDrafter", 3)
    assert (adaptive["method"], adaptive["identical"]) == ("adaptive", 3)
    assert (alone["method"], alone["identical"]) == ("matches alone", 3)
    assert {"matched_tokens", "accepted_matched_tokens"} <= set(alone["parts"])
    parts = redrafter["parts"]
    # The first token of a request is no verification, nor need its last steps be.
    assert 0 < parts["verifications"] <= redrafter["request_steps"] - 3
    assert parts["draft"] > 0 and parts["attention"] > 0
    assert redrafter["spec_decode"]["drafts"] == parts["verifications"]
    assert "ReDrafter 2x4:6, matches 2" in ended.stdout
