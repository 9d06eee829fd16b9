"""benchmarks/step_cost.py: what it counts, what it concludes; and that it needs a GPU."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as Python does for a script

import step_cost
import step_cost_floor
from step_cost_clock import PARTS, StepClock, install, read
from step_cost_report import Comparison, Cost, as_json, comparisons, print_report


class Clock:
    """A time that tests set; makes events."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self) -> Any:
        made = SimpleNamespace()
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda end: end.at - made.at
        return made

    def takes(self, milliseconds: float) -> Any:
        def work(*args: Any, **kwargs: Any) -> str:
            self.now += milliseconds
            return "done"

        return work


def test_a_step_is_split_into_its_parts_and_the_gap() -> None:
    time = Clock()
    clock = StepClock(time.event)
    compact = clock.timed("compact", time.takes(0.25))

    def score() -> None:
        time.takes(1)()
        compact()

    accept = clock.timed("accept", score)
    verify, draft = clock.timed("verify", time.takes(5)), clock.timed("draft", time.takes(2))
    for _ in range(3):
        clock.begin(4, prompt_tokens=False)
        assert verify() == "done"
        accept()
        draft()
        time.takes(0.5)()
    expected = {"verify": 5, "accept": 1, "compact": 0.25, "draft": 2, "step": 8.75, "gap": 0.5}
    assert clock.read(4) == [expected, expected]
    assert clock.read(4) == []


def test_steps_of_other_batches_and_with_prompts_are_left_out() -> None:
    time = Clock()
    clock = StepClock(time.event)
    verify = clock.timed("verify", time.takes(5))
    for requests, prompt in [(2, True), (2, False), (2, False), (1, False), (2, False)]:
        clock.begin(requests, prompt)
        verify()
    steps = clock.read(2)
    assert [step["step"] for step in steps] == [5]
    assert steps[0]["draft"] == 0


def test_the_clock_is_put_around_the_runner_s_methods() -> None:
    called = []
    runner = SimpleNamespace(
        execute_model=lambda scheduled: called.append("execute"),
        sample=lambda: called.append("sample"),
        speculator=SimpleNamespace(propose=lambda: called.append("propose")),
        model_state=SimpleNamespace(compact=lambda: called.append("compact")),
    )
    worker = SimpleNamespace(model_runner=runner)
    install(worker, on_host=True)
    for step in range(3):
        tokens = {"a": 4, "b": 4 if step else 9}
        runner.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=tokens,
                scheduled_spec_decode_tokens={"a": [1, 2, 3], "b": [1, 2, 3]},
                scheduled_new_reqs=[],
            )
        )
        runner.sample()
        runner.model_state.compact()
        runner.speculator.propose()
    assert called == ["execute", "sample", "compact", "propose"] * 3
    (step,) = read(worker, 2, on_host=True)
    assert step["step"] == pytest.approx(step["gap"] + sum(step[part] for part in PARTS))


def cost(nodes: int, step: float, requests: int = 1) -> Cost:
    parts = {"verify": step - 1, "draft": 0.5, "accept": 0.25, "compact": 0.125, "gap": 0.125}
    measured = [{"step": step + noise, **parts} for noise in (-1, 0, 5)]
    return Cost.of("llama-7b", nodes, requests, 512, measured)


def test_the_speed_up_is_tokens_per_step_over_the_ratio() -> None:
    (found,) = comparisons([cost(0, 10), cost(32, 12), cost(32, 20, requests=8)])
    assert found == Comparison(cost(32, 12), cost(0, 10))
    assert found.ratio == found.break_even == pytest.approx(1.2)
    assert found.speedup(4.2) == pytest.approx(3.5)
    assert (found.cost.step, found.cost.steps) == (12, 3)


def test_the_report_and_the_results_file() -> None:
    costs = [cost(0, 10), cost(32, 12)]
    out = io.StringIO()
    print_report(costs, Console(file=out, width=200))
    text = out.getvalue()
    for expected in ("llama-7b", "1.20", "3.50", "weights here are random"):
        assert expected in text
    plain, speculated = as_json(costs)
    assert plain["ratio"] is None and speculated["ratio"] == pytest.approx(1.2)
    json.dumps(as_json(costs))


def test_each_target_and_k_is_a_job_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {**step_cost.SHAPES["llama-7b"], "hidden_size": 32, "vocab_size": 64}
    monkeypatch.setitem(step_cost.SHAPES, "llama-7b", tiny)
    arguments = ["--targets", "llama-7b", "--nodes", "8", "32", "--batches", "1", "8"]
    options = step_cost.parser().parse_args([*arguments, "--contexts", "512", "--beams", "4x3"])
    made = step_cost.jobs(options, tmp_path)
    assert [job.nodes for job in made] == [0, 8, 32]
    assert made[0].cases == [(1, 512), (8, 512)]
    plain, speculative = (step_cost.engine_arguments(made[i]) for i in (0, 2))
    assert "speculative_config" not in plain
    assert speculative["speculative_config"]["num_speculative_tokens"] == 32
    assert speculative["speculative_config"]["beam_width"] == 4
    graphs = speculative["compilation_config"]
    assert graphs["cudagraph_capture_sizes"] == [1, 8, 33, 264]
    assert speculative["max_model_len"] > 512 + 100
    assert json.loads((Path(made[0].folder) / "config.json").read_text())["hidden_size"] == 32
    assert (Path(made[0].drafter) / "model.safetensors").exists()


TINY = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TARGET = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8) + 8 + 100 * 8
LEVEL = (8 * 8 + 8) + (8 * 8 + 8) + 8 * 8 + (8 * 8 + 8) + 100 * 8  # input's half, block, w, u, head


def test_weights_are_those_that_a_step_multiplies_with() -> None:
    weights = step_cost_floor.Weights.of(TINY, None)
    assert weights == step_cost_floor.Weights(TARGET, LEVEL, once=8 * 8)
    reduced = step_cost_floor.Weights.of(TINY, 10)
    assert reduced.per_level == LEVEL - 90 * 8


@pytest.mark.parametrize("bound", ["bandwidth", "rate"])
def test_a_floor_is_bytes_over_bandwidth_or_operations_over_rate(bound: str) -> None:
    fast, slow = 1e30, 1e3
    device = step_cost_floor.Device(
        bandwidth=slow if bound == "bandwidth" else fast, rate=slow if bound == "rate" else fast
    )
    weights = step_cost_floor.Weights(TARGET, LEVEL, once=64)
    (floor,) = step_cost_floor.floors(TINY, weights, device, (3, 4), [5], [(2, 10)])
    cache = 2 * 10 * 2 * 2 * 2 * 2 * 2  # requests, tokens, K and V, layers, heads, head size, bytes
    attention = 4 * 2 * 4 * 2 * 10  # layers, heads, head size, tokens
    if bound == "bandwidth":
        assert floor.plain == floor.verify == pytest.approx((2 * TARGET + cache) / slow)
        assert floor.draft == pytest.approx((4 * 2 * LEVEL + 2 * 64) / slow)
    else:
        assert floor.plain == pytest.approx(2 * (2 * TARGET + attention) / slow)
        assert floor.verify == pytest.approx(6 * floor.plain)
        assert floor.draft == pytest.approx((2 * LEVEL * (2 + 3 * 6) + 2 * 64 * 2) / slow)
    assert floor.ratio == pytest.approx((floor.verify + floor.draft) / floor.plain)


def test_floors_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--floor", "--targets", "llama-7b", "--batches", "1", "--contexts", "512"]
    assert step_cost.main([*arguments, "--nodes", "32"]) == 0
    printed = capsys.readouterr().out
    assert "nothing measured" in printed and "1.15" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, step_cost.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "torch finds none here; nothing is measured" in done.stderr
