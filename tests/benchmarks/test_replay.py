"""benchmarks/replay.py: from models and text to a table, a file and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import replay
from replay_parts.traces import Traces
from step_cost_parts.jobs import SHAPES

from redrafter_testing.models.cycle_language import HIDDEN_SIZE, VOCAB_SIZE, CycleTarget, rows
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.training.evaluation import Material

OPTIONS = [
    *("--requests", "1", "4", "--fixed", "1x3:3", "2x3:4"),
    "--adaptive",
    "3x3:6",
    "--samples=300",
]
CASE = ["--case", "a text", "target", "drafter", "data"]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {**SHAPES["llama-3-8b"], "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    monkeypatch.setitem(SHAPES, "llama-3-8b", tiny)
    drafter = RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16)).eval()
    material = Material(drafter, CycleTarget(), rows(), "temperature 0, top-p 1")
    monkeypatch.setattr(replay, "load_material", lambda *_: material)


@pytest.mark.usefixtures("models")
def test_all_methods_at_all_numbers_of_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, picture = tmp_path / "out.json", tmp_path / "out.png"
    files = ["--output", str(output), "--plot", str(picture)]
    assert replay.main([*CASE, *OPTIONS, "--draft-vocab-size", "32", *files]) == 0

    report = json.loads(output.read_text())
    found = [(r["requests"], r["method"]) for r in report["results"]]
    assert found == [(n, m) for n in (1, 4) for m in ("1x3:3", "2x3:4", "adaptive")]
    assert all(r["ratio"] > 0 and r["case"] == "a text" for r in report["results"])
    assert [r["calibration"] is None for r in report["results"]] == [True, True, False] * 2
    assert "data" not in json.dumps(report["settings"]), "paths stay here"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "arithmetic, nothing measured" in capsys.readouterr().out


@pytest.mark.usefixtures("models")
def test_the_cuda_engine_s_budget_is_replayed_besides(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    more = ["--lengths", "--launch-time", "2", "--output", str(output)]
    assert replay.main([*CASE, *OPTIONS, "--draft-vocab-size", "32", *more]) == 0
    found = json.loads(output.read_text())["results"]
    assert [r["method"] for r in found] == ["1x3:3", "2x3:4", "longest", "lengths", "adaptive"] * 2
    assert [r["calibration"] is None for r in found] == [True, True, False, False, False] * 2
    assert all(r["ratio"] > 0 for r in found)


@pytest.mark.usefixtures("models")
def test_every_search_that_the_budget_may_choose_is_recorded() -> None:
    options = replay.parser().parse_args([*CASE, *OPTIONS])
    methods = replay.methods_of(options)
    assert [config.adaptive for config in methods.values()] == [False, False, True]
    traces: Traces = replay.traced(options, ["target", "drafter", "data"], methods)
    # 3x3 is also searched with half its width and as a chain.
    assert sorted(traces.by_width) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fixed", "2x4"], "expected WxL:K"),
        (["--adaptive", "8x4:200"], "between 1 and 127"),
        (["--held-out", "0"], "expected an integer of at least 1"),
        (["--held-out", "4"], "data"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        replay.main([*CASE, *arguments])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
