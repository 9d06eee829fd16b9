"""benchmarks/throughput.py: what it accepts, how it counts, what it reports; and all of it once."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from redrafter_testing.engines import interpreted_engine
from redrafter_testing.models.tiny_models import (
    add_tokenizer,
    make_drafter,
    make_small_target,
    make_target,
)
from vllm_redrafter import ConfigError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as Python does for a script

import throughput
import throughput_process
from throughput_engine import Generation, Job, Run, generate
from throughput_methods import InputError, Method, plan
from throughput_plot import plot
from throughput_process import EngineError, run_engine
from throughput_prompts import choose, read_dataset, tokenize
from throughput_report import (
    Measurement,
    Row,
    measurements,
    print_table,
    repeated_share,
    same_as_plain,
    summarise,
)

SCRIPT = Path(throughput.__file__)
PARTS = {"draft": 0.1, "forward": 0.5, "attention": 0.2, "accept": 0.05, "compact": 0.01}


# Methods and shapes


def test_a_method_gets_one_engine_for_all_its_levels() -> None:
    plain, ngram, redrafter = plan("drafter", [4, 1, 4], ["2x4:6"], ["5"])

    assert (plain.label, plain.levels, plain.speculative_config) == ("plain", (1, 4), None)
    assert (ngram.label, ngram.levels) == ("n-gram 5", (1, 4))
    assert ngram.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    assert (redrafter.label, redrafter.levels) == ("ReDrafter 2x4:6", (1, 4))
    assert redrafter.speculative_config == {
        "model": "drafter",
        "num_speculative_tokens": 6,
        "beam_width": 2,
        "beam_length": 4,
    }


def test_shapes_are_measured_at_the_level_they_are_bound_to() -> None:
    shapes = ["1=3x5:12", "8=1x3:3", "1=1x3:3", "2x4:6"]
    methods = plan("drafter", [1, 4, 8], shapes, ["1=7", "4"])

    assert {m.label: m.levels for m in methods} == {
        "plain": (1, 4, 8),
        "n-gram 7": (1,),
        "n-gram 4": (1, 4, 8),
        "ReDrafter 3x5:12": (1,),
        "ReDrafter 1x3:3": (1, 8),
        "ReDrafter 2x4:6": (1, 4, 8),
    }


def test_sampled_ngram_speculation_is_left_out_on_cpus() -> None:
    plain, ngram, redrafter = plan("drafter", [1], ["2x4:6"], ["5"])
    for method in (plain, redrafter):
        assert method.temperatures([0, 0.7], is_cpu=True) == [0, 0.7]
    assert ngram.temperatures([0, 0.7], is_cpu=True) == [0]
    assert ngram.temperatures([0, 0.7], is_cpu=False) == [0, 0.7]


@pytest.mark.parametrize("shape", ["", "2x4", "2:4x6", "2x4:6:8", "x4:6", "-1x4:6", "=2x4:6"])
def test_a_malformed_shape_is_refused(shape: str) -> None:
    with pytest.raises(InputError, match=r"expected WxL:K"):
        plan("drafter", [1], [shape], ["5"])


@pytest.mark.parametrize("tokens", ["", "0", "x", "1=", "2x4:6"])
def test_a_malformed_ngram_setting_is_refused(tokens: str) -> None:
    with pytest.raises(InputError, match="--ngram-tokens"):
        plan("drafter", [1], ["2x4:6"], [tokens])


def test_a_shape_that_redrafter_refuses_is_refused_here() -> None:
    with pytest.raises(ConfigError, match="between 1 and 127"):
        plan("drafter", [1], ["2x4:128"], ["5"])


def test_a_level_that_is_not_measured_cannot_be_bound() -> None:
    with pytest.raises(InputError, match="concurrency 2, which is not measured"):
        plan("drafter", [1, 4], ["2x4:6", "2=1x3:3"], ["5"])


def test_a_level_without_a_shape_is_refused() -> None:
    with pytest.raises(InputError, match="nothing is given for concurrency 4"):
        plan("drafter", [1, 4], ["1=2x4:6"], ["5"])


# Prompts


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_text_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "one prompt\r\n\nanother\u2028one\n  \n")
    assert read_dataset(path) == (["one prompt", "another\u2028one"], 0)


RECORDS: list[dict[str, Any]] = [
    {"prompt": "a", "text": "not this"},
    {"text": "b"},
    {"turns": ["c", "d"]},
    {"conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "f"}]},
    {"messages": [{"role": "system", "content": "g"}, {"role": "user", "content": "h"}]},
    {"conversations": [{"from": "gpt", "value": "an answer to nothing"}]},
    {"conversations": []},
]
PROMPTS = [
    "a",
    "b",
    [{"role": "user", "content": "c"}],
    [{"role": "user", "content": "e"}],
    [{"role": "system", "content": "g"}, {"role": "user", "content": "h"}],
]


def test_records_of_all_kinds_are_read(tmp_path: Path) -> None:
    lines = "\n\n".join(map(json.dumps, RECORDS))
    assert read_dataset(written(tmp_path, "a.jsonl", lines)) == (PROMPTS, 2)
    assert read_dataset(written(tmp_path, "a.json", json.dumps(RECORDS))) == (PROMPTS, 2)


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    assert read_dataset(path) == (["a", "b"], 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'x'}", "line 3: not JSON"),
        ("[]", "line 3: expected an object, got list"),
        ("{}", "line 3: none of prompt, text, turns, conversations, messages"),
        ('{"prompt": 5}', "line 3: 'prompt' must be text, got 5"),
        ('{"text": " "}', "line 3: 'text' must be text"),
        ('{"turns": "x"}', "line 3: 'turns' must be a list of texts"),
        ('{"messages": [{"role": "user"}]}', "line 3: 'messages' must be a list of messages"),
        ('{"conversations": null}', "line 3: 'conversations' must be a list of messages"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, "a.jsonl", f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(InputError, match=message):
        read_dataset(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "there is no prompt in it"),
        ("a.jsonl", '{"messages": []}', "there is no prompt in it"),
        ("a.csv", "prompt\nx", "unknown format '.csv'"),
        ("a.json", '{"prompt": "x"}', "expected a list"),
        ("a.json", "[", "not JSON"),
        ("a.parquet", "x", "not a Parquet file"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_dataset(written(tmp_path, name, text))


class Words:
    """A tokenizer: a token per word, the beginning-of-text token in front where asked."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[Any]:
        return ["<s>"] * add_special_tokens + text.split()

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages)


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (None, None, [["<s>", "a"], ["<s>", "h"]]),
        ("template", None, [["<s>", "a"], ["<system>", "g", "<user>", "h"]]),
        ("template", True, [["<user>", "a"], ["<system>", "g", "<user>", "h"]]),
        ("template", False, [["<s>", "a"], ["<s>", "h"]]),
    ],
)
def test_the_chat_template_is_for_conversations(
    template: str | None, chat: bool | None, expected: list[list[str]]
) -> None:
    assert tokenize(["a", PROMPTS[-1]], Words(template), chat) == expected


def test_chat_needs_a_template() -> None:
    with pytest.raises(InputError, match="no chat template"):
        tokenize(["a"], Words(None), chat=True)


def test_prompts_are_drawn_by_the_seed_and_repeated_to_fill_the_highest_level() -> None:
    prompts = [[i] * (i + 1) for i in range(20)]
    drawn = choose(prompts, count=5, longest=10, at_least=2, seed=3)
    assert len(drawn) == 5 and all(prompt in prompts[:10] for prompt in drawn)
    assert drawn == choose(prompts, count=5, longest=10, at_least=2, seed=3)
    assert choose(prompts[:2], count=5, longest=None, at_least=3, seed=0) == [[0], [1, 1], [0]]


def test_prompts_must_fit_and_have_tokens() -> None:
    with pytest.raises(InputError, match="the shortest has 3 tokens, and only 2 leave room"):
        choose([[1, 2, 3]], count=1, longest=2, at_least=1, seed=0)
    with pytest.raises(InputError, match="a prompt is empty"):
        choose([[1], []], count=2, longest=None, at_least=1, seed=0)


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "either --prompt or --dataset"),
        ("--prompt a --dataset b.txt", "either --prompt or --dataset"),
        ("--dataset nowhere.txt", "nowhere.txt: no such file"),
        ("--prompt=", "--prompt is empty"),
        ("--prompt a --shape 2x4", "expected WxL:K"),
        ("--prompt a --concurrency 0", "expected an integer of at least 1"),
        ("--prompt a --temperature -1", "expected a number of at least 0"),
        ("--prompt a --temperature nan", "expected a number of at least 0"),
        ("--prompt a --engine-args [1]", "expected a JSON object"),
        ("--prompt a --engine-args {", "not JSON"),
        ("--prompt a --output nowhere/a.json", "no such folder"),
        ("--prompt a --plot nowhere/a.png", "no such folder"),
        ("--prompt a --drafter /nowhere", "no such folder"),
        ("--prompt a --model /nowhere", "--model /nowhere"),
        ("--prompt a --max-tokens 600", "no prompt fits"),
    ],
)
def test_bad_input_ends_before_any_engine_starts(
    arguments: str,
    message: str,
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(throughput, "_compare", lambda *_: pytest.fail("went on"))
    model, drafter = map(str, models)
    with pytest.raises(SystemExit) as ended:
        throughput.main(["--model", model, "--drafter", drafter, *arguments.split()])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(target)
    return target, make_drafter(tmp_path_factory.mktemp("drafter"))


def test_every_repeat_starts_with_another_method() -> None:
    methods = plan("drafter", [1], ["2x4:6"], ["5"])
    firsts = [throughput.rotated(methods, repeat)[0].name for repeat in range(4)]
    assert firsts == ["plain", "n-gram", "ReDrafter", "plain"]
    assert {m.name for m in throughput.rotated(methods, 1)} == {m.name for m in methods}


# The loop over steps


@dataclass
class FakeEngine:
    """Two tokens per step and request, except for the first; a request has six."""

    tokens: dict[str, int] = field(default_factory=dict)
    most_in_flight: int = 0

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert prompt["prompt_token_ids"] == [int(request_id)]
        self.tokens[request_id] = 0

    def step(self) -> list[Any]:
        self.most_in_flight = max(self.most_in_flight, len(self.tokens))
        outputs = []
        for request in list(self.tokens):
            count = 2 if self.tokens[request] else 1
            self.tokens[request] += count
            finished = self.tokens[request] >= 6
            outputs.append(
                SimpleNamespace(
                    request_id=request,
                    finished=finished,
                    outputs=[SimpleNamespace(token_ids=[int(request)] * count)],
                )
            )
            if finished:
                del self.tokens[request]
        return outputs


def test_requests_are_kept_in_flight_and_steps_are_counted() -> None:
    engine = FakeEngine()
    llm = SimpleNamespace(llm_engine=engine)

    made = generate(llm, [[i] for i in range(5)], params=None, concurrency=2)

    assert made.outputs == [[i] * 7 for i in range(5)]
    assert engine.most_in_flight == 2
    assert (made.steps, made.request_steps) == (12, 20)
    assert made.seconds > 0


# An engine's process

JOB = Job({"speculative_config": None}, [[1]], [1, 2], [0.0], 8, False, False)


def test_runs_are_read_back_and_counted_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run(1.0, [[1, 2]]), run(2.0, [[3]], parts=PARTS)]
    lines = "".join(json.dumps(asdict(made)) + "\n" for made in runs)
    script = written(tmp_path, "engine.py", f"import sys; open(sys.argv[2], 'w').write({lines!r})")
    monkeypatch.setattr(throughput_process, "ENGINE_SCRIPT", script)
    completed: list[None] = []

    assert run_engine(JOB, {}, lambda: completed.append(None)) == runs
    assert len(completed) == 2


def test_a_failed_engine_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = written(tmp_path, "engine.py", "import os; exit(os.environ['SET'])")
    monkeypatch.setattr(throughput_process, "ENGINE_SCRIPT", script)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(
        EngineError, match=r"no such model\nThe engine .* failed; its log: "
    ) as failed:
        run_engine(JOB, {"SET": "no such model"}, lambda: None)
    assert Path(str(failed.value).split()[-1]).read_text() == "no such model\n"


# Measurements and the table


def run(seconds: float, outputs: list[list[int]], **changes: Any) -> Run:
    made = Generation(outputs, seconds, steps=4, request_steps=8)
    values: dict[str, Any] = {"concurrency": 2, "temperature": 0.0, "parts": None, **changes}
    return Run(generation=made, spec_decode={}, **values)


def measured(method: str = "plain", shape: str = "", **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "repeat": 0,
        "concurrency": 2,
        "temperature": 0.0,
        "seconds": 1.0,
        "requests": 2,
        "output_tokens": 100,
        "steps": 50,
        "request_steps": 100,
        "repeated_ngrams": 0.25,
        "identical": None if method == "plain" else 2,
        "spec_decode": {},
        "parts": PARTS if method == "ReDrafter" else None,
    }
    return Measurement(method, shape, **{**values, **changes})


@pytest.mark.parametrize(
    ("outputs", "share"),
    [
        ([], 0),
        ([[1, 2, 3]], 0),
        ([[1, 2, 3, 4]], 0),
        ([[5, 5, 5, 5, 5]], 1 / 2),  # two 4-grams, the second repeats the first
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 1 / 5),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0),  # not the same output
        ([[5, 5, 5, 5, 5], [1, 2, 3, 4, 5]], 1 / 4),
    ],
)
def test_repetition_is_counted_within_an_output(outputs: list[list[int]], share: float) -> None:
    assert repeated_share(outputs, n=4) == pytest.approx(share)


def test_outputs_are_compared_with_the_same_repeats_plain_decoding() -> None:
    redrafter = Method("ReDrafter", "2x4:6", (2,), {})
    plain = [run(1.0, [[1, 2], [3, 4]]), run(1.0, [[9], [9]], temperature=0.7)]
    runs = [run(0.5, [[1, 2], [3, 5]]), run(0.5, [[1], [1]], temperature=0.7)]

    greedy, sampled = measurements(redrafter, 1, runs, plain)

    assert (greedy.identical, greedy.requests, greedy.output_tokens) == (1, 2, 4)
    assert sampled.identical is None
    assert measurements(Method("plain", "", (2,), None), 0, plain, plain)[0].identical is None


def test_tokens_per_step_leaves_out_the_prompts_step() -> None:
    # Two requests of 41 tokens each, in 1 + 10 steps each.
    assert measured(output_tokens=82, request_steps=22).tokens_per_step == 4
    assert measured(output_tokens=2, request_steps=2).tokens_per_step is None


def test_shares_are_of_the_wall_time_and_verify_is_without_attention() -> None:
    assert measured("ReDrafter", seconds=2.0).shares == pytest.approx(
        {"draft": 0.05, "verify": 0.15, "attention": 0.1, "accept": 0.025, "compact": 0.005}
    )
    assert measured().shares is None


def test_ratios_are_taken_within_a_repeat() -> None:
    """The machine slows down threefold; a ratio of medians would say 1.5, not 2."""
    plain_seconds, fast_seconds = [1.0, 1.0, 3.0], [0.5, 1.5, 1.5]
    rows = summarise(
        [measured(repeat=i, seconds=s) for i, s in enumerate(plain_seconds)]
        + [measured("ReDrafter", "2x4:6", repeat=i, seconds=s) for i, s in enumerate(fast_seconds)]
    )

    assert [row.method for row in rows] == ["plain", "ReDrafter"]
    assert rows[0].ratio == (1, 1, 1)
    assert rows[1].ratio == pytest.approx((2, 2 / 3, 2))
    assert rows[1].tokens_per_second == pytest.approx((100 / 1.5, 100 / 1.5, 200))


def several_rows() -> list[Row]:
    made = []
    for temperature in (0.0, 0.7):
        for level in (1, 8):
            at = {"temperature": temperature, "concurrency": level}
            made += [
                measured(**at),
                measured("n-gram", "5", seconds=0.8, **at),
                measured("ReDrafter", "2x4:6", seconds=0.5, identical=1, **at),
                measured("ReDrafter", "1x3:3", seconds=0.4, **at),
                measured("ReDrafter", "1x3:3", repeat=1, seconds=0.6, **at),
                measured(repeat=1, **at),
            ]
    return summarise(made)


def test_rows_are_ordered_for_reading() -> None:
    rows = several_rows()
    assert [(r.temperature, r.concurrency, r.method, r.shape) for r in rows[:5]] == [
        (0, 1, "plain", ""),
        (0, 1, "n-gram", "5"),
        (0, 1, "ReDrafter", "2x4:6"),
        (0, 1, "ReDrafter", "1x3:3"),
        (0, 8, "plain", ""),
    ]
    assert len(rows) == 16


def test_the_table_has_every_figure_in_the_narrowest_terminal() -> None:
    console = Console(width=40, record=True, file=io.StringIO())
    settings = {"model": "m", "dtype": "float32", "max_tokens": 8}
    print_table(several_rows(), settings, console)
    lines = [line for line in console.export_text().splitlines() if line.strip()[:1].isdigit()]

    def cells(method: str) -> list[str]:
        return next(line.split(method)[1].split() for line in lines if method in line)

    assert lines[0].split()[:3] == ["0", "1", "(2.0)"]
    assert cells("plain ") == ["100", "1", "1.00", "25%", *"–––––", "–"]
    assert cells("n-gram 5") == ["125", "1.25", "1.00", "25%", *"–––––", "yes"]
    assert cells("ReDrafter 2x4:6") == (
        ["200", "2.00", "1.00", "25%", "20%", "60%", "40%", "10%", "2%", "no", "(1/2)"]
    )
    assert cells("ReDrafter 1x3:3")[:4] == ["208", "(167–250)", "2.08", "(1.67–2.50)"]


def test_the_same_outputs_are_counted_over_all_repeats() -> None:
    row = several_rows()[1]
    assert same_as_plain(replace(row, identical=6, requests=6)) == "yes"
    assert same_as_plain(replace(row, identical=5, requests=6)) == "no (5/6)"
    assert same_as_plain(replace(row, identical=None)) == "–"


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    plot(several_rows(), "a target on a machine", path)
    assert path.read_bytes().startswith(b"\x89PNG")


# All of it


def canned_engine(repeats_seen: list[int]) -> Callable[..., list[Run]]:
    def run_engine(job: Any, variables: dict[str, str], advance: Any) -> list[Run]:
        repeats_seen.append(job.engine["seed"])
        runs = []
        for concurrency in job.levels:
            for temperature in job.temperatures:
                at = {"concurrency": concurrency, "temperature": temperature}
                parts = PARTS if job.timed_parts else None
                runs.append(run(1.0, [[1] * 9 for _ in job.prompts], parts=parts, **at))
                advance()
        return runs

    return run_engine


@pytest.mark.parametrize("is_cpu", [True, False])
def test_from_arguments_to_files_without_an_engine(
    is_cpu: bool,
    tmp_path: Path,
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")
    platform = SimpleNamespace(is_cpu=lambda: is_cpu, get_device_name=lambda: "a GPU")
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    seeds: list[int] = []
    monkeypatch.setattr(throughput, "run_engine", canned_engine(seeds))
    output, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--model", str(models[0]), "--drafter", str(models[1]), "--repeats", "2"]
    arguments += ["--prompt", "name", "--prompt", "value", "--concurrency", "1", "4"]
    arguments += ["--shape", "1=2x4:6", "4=1x3:3", "--output", str(output), "--plot", str(picture)]

    throughput.main(arguments)

    text = output.read_text()
    report = json.loads(text)
    assert str(tmp_path.parent) not in text, "a results file must not hold this machine's paths"
    assert seeds == [0, 0, 0, 0, 1, 1, 1, 1]  # four engines per repeat
    # Two levels, at each ReDrafter has one shape; two temperatures, but for n-grams on CPUs.
    rows = 2 * 2 + 2 * (1 if is_cpu else 2) + 2 * 2
    assert len(report["rows"]) == rows
    assert len(report["measurements"]) == 2 * rows
    assert report["settings"]["num_prompts"] == 4  # two prompts, repeated to fill concurrency 4
    assert report["machine"]["gpu"] == (None if is_cpu else "a GPU")
    assert is_cpu or not report["settings"]["environment"]["LD_PRELOAD"]
    assert picture.exists()
    assert "ReDrafter 2x4:6" in capsys.readouterr().out


@pytest.mark.engine
def test_three_methods_through_real_engines(tmp_path: Path, models: tuple[Path, Path]) -> None:
    output = tmp_path / "out.json"
    options = (
        "--dtype float32 --enforce-eager --repeats 1 --concurrency 2 --temperature 0 "
        "--max-tokens 24 --ignore-eos --prompt name:value1 --prompt list:[7] --prompt value:[14]"
    )
    command = [sys.executable, str(SCRIPT), "--model", str(models[0]), "--drafter", str(models[1])]
    ended = subprocess.run(
        [*command, *options.split(), "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr

    report = json.loads(output.read_text())
    assert {"vllm-redrafter", "torch"} <= set(report["versions"])
    assert report["machine"]["cpu"] and report["machine"]["cores"] and report["date"]
    plain, ngram, redrafter = report["measurements"]
    for measurement in (plain, ngram, redrafter):
        assert measurement["requests"] == 3 and measurement["output_tokens"] == 72
        assert measurement["seconds"] > 0
    assert (plain["method"], plain["request_steps"], plain["identical"]) == ("plain", 72, None)
    assert (ngram["method"], ngram["identical"]) == ("n-gram", 3)
    assert (redrafter["method"], redrafter["identical"]) == ("ReDrafter", 3)
    parts = redrafter["parts"]
    # The first token of a request is no verification, nor need its last steps be.
    assert 0 < parts["verifications"] <= redrafter["request_steps"] - 3
    assert parts["draft"] > 0 and parts["attention"] > 0
    assert redrafter["spec_decode"]["drafts"] == parts["verifications"]
    assert "ReDrafter 2x4:6" in ended.stdout


@pytest.mark.engine
def test_it_runs_unchanged_on_model_runner_v2(tmp_path: Path) -> None:
    target = make_small_target(tmp_path / "target")
    add_tokenizer(target)
    drafter = make_drafter(tmp_path / "drafter", hidden_size=64)
    options = (
        "--dtype float32 --enforce-eager --repeats 1 --concurrency 1 --temperature 0 "
        "--max-tokens 8 --ignore-eos --prompt name:value1 --shape 2x3:4"
    )
    command = [sys.executable, str(SCRIPT), "--model", str(target), "--drafter", str(drafter)]
    environment = dict(interpreted_engine.ENVIRONMENT)
    del environment["PYTHONSAFEPATH"]  # the benchmark imports its neighbours
    ended = subprocess.run(
        [*command, *options.split(), "--output", str(tmp_path / "out.json")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    plain, ngram, redrafter = json.loads((tmp_path / "out.json").read_text())["measurements"]
    assert (plain["request_steps"], ngram["identical"], redrafter["identical"]) == (8, 1, 1)
    parts = redrafter["parts"]
    assert parts["verifications"] > 0
    assert all(parts[part] > 0 for part in ("forward", "draft", "accept", "compact"))
