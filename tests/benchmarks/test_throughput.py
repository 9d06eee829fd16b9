# SPDX-License-Identifier: Apache-2.0
"""benchmarks/throughput.py: what it accepts, what it writes; and all of it once."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import throughput
from datasets import Dataset
from throughput_parts import engine, turns
from throughput_parts.engine import Case, Generation, Job, Run
from throughput_parts.prompts import PLACEHOLDER, STREAMS, read_dataset

from redrafter_testing import process_trees
from redrafter_testing.models.tiny_models import make_drafter
from vllm_redrafter import ConfigError
from vllm_redrafter.data.conversation_rows import Conversation

SCRIPT = Path(throughput.__file__)
COUNTED = {"drafts": 6, "draft_tokens": 27, "accepted_tokens": 9}


@pytest.fixture(scope="module")
def models(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return target, make_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--chat", "no chat template; --no-chat asks in bare text"),
        ("--max-tokens 511", "chat: no prompt fits"),
        ("--dataset nowhere.txt", "nowhere.txt: no such file"),
        ("--shape 2x4", "'2x4': expected WxL:K"),
        ('--method {"method":"suffix"}', "num_speculative_tokens must be an integer"),
        ('--settings {"beam_width":2}', "'beam_width' is none of candidates, context_matches,"),
        ('--settings {"context_matches":9}', "context_matches must be between 0 and 4"),
        ("--drafter /nowhere", "no such folder"),
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


def test_speed_bench_is_read_as_its_scripts_write_it(tmp_path: Path) -> None:
    more = {"multiturn": True, "sub_category": None, "turns": ["One?", "Two?"]}
    rows = Dataset.from_list([{"category": task, **more} for task in ("qa", "rag")])
    rows.to_parquet(parquet := tmp_path / "test.parquet")
    messages = [{"role": "user", "content": turn} for turn in ("One?", "Two?")]
    rows.map(lambda _: {"messages": messages}, remove_columns="turns").to_json(tmp_path / "a.jsonl")
    for path in parquet, tmp_path / "a.jsonl":
        assert read_dataset(path)[0] == {key: [Conversation(("One?",))] for key in ("qa", "rag")}
    Dataset.from_list([{"turns": [f"{PLACEHOLDER} …"]}]).to_parquet(parquet)
    with pytest.raises(ConfigError, match=r", row 1: a placeholder, 'FULL .*; prepare SPEED-Bench"):
        read_dataset(parquet)


@dataclass
class CannedEngine:
    """An engine without a process."""

    job: Job
    events: list[str]

    def __enter__(self) -> Self:
        self.events.append(f"start {self.job.seed}")
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("end")

    def wait_until_started(self) -> None: ...

    def measure(self, case: Case) -> Run:
        self.events.append("measure")
        counted = COUNTED if self.job.engine["speculative_config"] else {}
        outputs = [[1] * 9 for _ in self.job.prompts_at(case)]
        return Run(case, Generation(outputs, seconds=1.0, steps=4, request_steps=8), counted)

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def without_engines(monkeypatch: pytest.MonkeyPatch, is_cpu: bool) -> list[str]:
    """Have canned engines started, on a machine of that kind; returns what happens to them."""
    pytest.importorskip("vllm")
    platform = SimpleNamespace(is_cpu=lambda: is_cpu, get_device_name=lambda: "a GPU")
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    events: list[str] = []
    monkeypatch.setattr(turns, "EngineProcess", lambda job, *_: CannedEngine(job, events))
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
    rows = [{"category": task, "prompt": text} for task in ("b", "a") for text in ("name", "value")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--model", str(models[0]), "--drafter", str(models[1]), "--repeats", "2"]
    arguments += ["--dataset", str(tmp_path / "rows.jsonl"), "--concurrency", "1", "4"]
    arguments += ["--matches-alone", "--plain-again", "--settings", '{"context_matches": 2}']
    draft_model = {"method": "draft_model", "model": str(models[0]), "num_speculative_tokens": 3}
    again = {**draft_model, "draft_tensor_parallel_size": 1}
    arguments += ["--method", json.dumps(draft_model), json.dumps(again)]
    in_tree = {"method": "redrafter", "num_speculative_tokens": 8, "draft": draft_model}
    arguments += [json.dumps(in_tree), "--prompts-per-request", "1"]

    throughput.main([*arguments, "--output", str(output)])

    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path.parent) not in text, "a results file must not hold this machine's paths"
    assert list(dict.fromkeys((row["method"], row["shape"]) for row in report["rows"])) == [
        ("plain", ""),
        ("plain again", ""),
        ("draft_model", f"{models[0].name}, 3"),
        ("draft_model", f"{models[0].name}, 3, draft_tensor_parallel_size 1"),
        ("draft_model in a tree", f"{models[0].name}, 3, 8"),
        ("matches alone", "12, context_matches 2"),
        ("ReDrafter", "2x4:6, context_matches 2"),
        ("adaptive", "4x5:12, context_matches 2"),
    ]
    starts = [event for event in events if event.startswith("start")]
    if is_cpu:  # all of the eight engines at once
        assert events[:8] == starts == ["start 0"] * 8 and events[-8:] == ["end"] * 8
    else:
        assert starts == ["start 0"] * 8 + ["start 1"] * 8
        assert events.index("end") < events.index("start 0", 1), "two engines at a time"
    # Two levels and temperatures, but for vLLM's methods on CPUs.
    cases = 2 * (6 * 2 + 2 * (1 if is_cpu else 2))
    assert events.count("measure") == 2 * 2 * cases, "repeats and tasks"
    assert len(report["rows"]) == 3 * cases, "tasks and their total"
    greedy = [row for row in report["rows"] if row["method"] == "ReDrafter"][:6]
    assert [row["requests"] for row in greedy] == [4, 4, 8, 8, 8, 16], "of both repeats"
    assert all(row["identical"] == row["requests"] for row in greedy)
    assert [row["nodes"] for row in greedy] == [4.5] * 6
    assert [row["undrafted"] for row in greedy[:2]] == [0, 0]
    assert len(list(tmp_path.glob("out-*.log"))) == 8, "a log for each method"
    assert report["machine"]["gpu"] == (None if is_cpu else "a GPU")
    assert " total " in capsys.readouterr().out


def test_several_drafters_have_the_shapes_each(
    tmp_path: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_engines(monkeypatch, is_cpu=True)
    other = make_drafter(tmp_path / "other")
    drafters = ["--drafter", str(models[1]), str(other)]
    (tmp_path / "one.txt").write_text("name")
    drafters += ["--dataset", str(tmp_path / "one.txt")]
    output = tmp_path / "out.json"

    throughput.main(["--model", str(models[0]), *drafters, "--output", str(output)])

    report = json.loads(output.read_text())
    names = [models[1].name, "other"]
    ours = {row["shape"] for row in report["rows"] if row["method"] in ("ReDrafter", "adaptive")}
    assert ours == {f"{name}, {shape}" for name in names for shape in ("2x4:6", "4x5:12")}
    assert report["settings"]["drafter"] == names


def test_a_stream_is_asked_whole_and_in_its_order(
    tmp_path: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_engines(monkeypatch, is_cpu=True)
    lengths = []

    def started(job: Job, *_: object) -> CannedEngine:
        lengths.append([len(prompt) for prompt in job.prompts])
        return CannedEngine(job, [])

    monkeypatch.setattr(turns, "EngineProcess", started)
    (tmp_path / "prompts.txt").write_text("\n".join("1" * length for length in range(1, 41)))
    dataset = ["--dataset", str(tmp_path / "prompts.txt")]
    for more in ["--stream"], []:
        throughput.main(["--model", str(models[0]), "--drafter", str(models[1]), *dataset, *more])
    stream, drawn = lengths[0], lengths[-1]
    assert len(stream) == 40 and stream == sorted(stream)
    assert len(drawn) == 32 and drawn != sorted(drawn)
    own = {task: len(set(prompts)) for task, prompts in read_dataset(STREAMS)[0].items()}
    assert own == {"json": 60, "sql": 80, "support": 100}, "no two prompts are equal"


@dataclass
class SuffixCache:
    max_tree_depth: int
    max_cached_requests: int
    answers: int = 0


def test_a_measurement_knows_no_answer_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    proposer = SimpleNamespace(suffix_cache=SuffixCache(24, 7))
    prefixes: list[int] = []
    known = []

    def generate(*_: object) -> Generation:
        known.append((proposer.suffix_cache.answers, len(prefixes)))
        proposer.suffix_cache.answers += 1
        prefixes.append(1)
        return Generation([], 1.0, 1, 1)

    monkeypatch.setattr(engine, "generate", generate)
    worker = SimpleNamespace(model_runner=SimpleNamespace(drafter=proposer))
    llm = SimpleNamespace(
        reset_prefix_cache=prefixes.clear,
        collective_rpc=lambda call: call(worker),
        get_metrics=lambda: [],
    )
    given = {"speculative_config": {"method": "suffix"}}
    job = Job(given, 0, [[1], [2]], None, max_tokens=8, ignore_eos=True, tasks=[None] * 2)
    for _ in range(2):
        engine.measure(llm, job, Case(2, 0.0))
    # A warm-up, a last request, then the measurement; twice.
    assert known[2::3] == [(0, 0)] * 2 and known[3] == (1, 1)
    assert proposer.suffix_cache == SuffixCache(24, 7, answers=1)


@pytest.mark.engine
def test_three_methods_through_real_engines(tmp_path: Path, models: tuple[Path, Path]) -> None:
    output, dataset = tmp_path / "out.json", tmp_path / "prompts.txt"
    dataset.write_text("name:value1\nlist:[7]\nvalue:[14]\n")
    options = (
        "--dtype float32 --repeats 1 --concurrency 2 --temperature 0 --max-tokens 24 --ignore-eos "
        '--engine-args {"enforce_eager":true} --shape 2x4:6 --adaptive 2x4:8 --method'
    )
    command = [sys.executable, str(SCRIPT), "--model", str(models[0]), "--drafter", str(models[1])]
    ended = process_trees.run(
        [*command, *options.split(), "--dataset", dataset, "--output", output],
        timeout=400,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # a third of vLLM's imports
    )
    assert ended.returncode == 0, ended.stderr
    plain, fixed, adaptive = json.loads(output.read_text())["measurements"]
    for measurement in (plain, fixed, adaptive):
        assert measurement["requests"] == 3 and measurement["output_tokens"] == 72
        assert measurement["seconds"] > 0
    assert (plain["method"], plain["request_steps"], plain["identical"]) == ("plain", 72, None)
    assert (adaptive["method"], adaptive["identical"]) == ("adaptive", 3)
    assert (fixed["method"], fixed["identical"]) == ("ReDrafter", 3)
    # The first token of a request is no verification, nor need its last steps be.
    assert 0 < fixed["spec_decode"]["drafts"] <= fixed["request_steps"] - 3
    assert (tmp_path / "out-adaptive-2x4-8.log").read_text(), "the engine's log is kept"
