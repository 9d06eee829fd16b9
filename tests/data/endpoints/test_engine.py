"""Servers that answer, die, return, hang and fail: the data is that of one engine, or an error."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from redrafter_testing.engines.fake_engine import FakeEngine
from redrafter_testing.engines.fake_server import FakeServer
from redrafter_testing.in_background import in_background
from vllm_redrafter.cli.main import app
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.dataset import finished_shards
from vllm_redrafter.data.endpoints import client, endpoint
from vllm_redrafter.data.endpoints.addresses import AddressBook
from vllm_redrafter.data.endpoints.engine import EndpointEngine
from vllm_redrafter.data.endpoints.served_target import ServedTarget
from vllm_redrafter.data.generation import GenerationSummary, generate_data
from vllm_redrafter.data.generation_settings import (
    EndpointSettings,
    GenerationSettings,
    SamplingSettings,
)
from vllm_redrafter.utils.errors import ConfigError

SETTINGS = GenerationSettings(sampling=SamplingSettings(max_tokens=40), shard_size=3, in_flight=4)
PROMPTS = [
    Conversation(tuple(f"value {i} list {turn}" for turn in range(1 + i % 3)), source=f"line {i}")
    for i in range(20)
]
LIMITS = EndpointSettings(request_timeout=20.0, give_up_after=20.0)

Serve = Callable[..., FakeServer]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


@pytest.fixture(scope="module")
def expected(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one engine in this process writes."""

    def start(name: str, settings: GenerationSettings) -> FakeEngine:
        return FakeEngine(AutoTokenizer.from_pretrained(name), settings)

    output, console = tmp_path_factory.mktemp("expected"), Console(file=io.StringIO())
    generate_data(str(target), PROMPTS, output, start, SETTINGS, console)
    return content(output)


class Run:
    """`generate_data` with servers, and what it says."""

    def __init__(self, target: Path, output: Path) -> None:
        self.target, self.output = target, output
        self.said = io.StringIO()

    def __call__(
        self,
        *given: str,
        settings: GenerationSettings = SETTINGS,
        limits: EndpointSettings = LIMITS,
    ) -> GenerationSummary:
        console = Console(file=self.said, width=1000)

        def start(name: str, settings: GenerationSettings) -> EndpointEngine:
            served = ServedTarget(name, settings, None, self.output)
            return EndpointEngine(AddressBook(given), served, settings, limits, console)

        return generate_data(str(self.target), PROMPTS, self.output, start, settings, console)

    def meanwhile(self, *given: str, **values: Any) -> Future[GenerationSummary]:
        """Its result, to come."""
        return in_background(lambda: self(*given, **values))

    def wait_for(self, pattern: str, run: Future[Any] | None = None) -> None:
        eventually(lambda: re.search(pattern, self.said.getvalue()), run)


def eventually(
    condition: Callable[[], object], run: Future[Any] | None = None, seconds: float = 20
) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        if run is not None and run.done():
            run.result()
            assert condition(), "it ended too early"
        time.sleep(0.005)


@pytest.fixture
def run(target: Path, tmp_path: Path) -> Run:
    return Run(target, tmp_path / "data")


def test_servers_write_what_an_engine_in_this_process_writes(
    serve: Serve, run: Run, expected: dict[str, bytes]
) -> None:
    servers = [serve(pause=0.01) for _ in range(3)]
    summary = run(*(server.address for server in servers))
    assert content(run.output) == expected
    assert summary.answers == sum(len(c.turns) for c in PROMPTS)
    assert all(1 < server.most_at_once <= 4 for server in servers), "in flight, for each server"
    for body in (body for server in servers for body in server.asked):
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1, 1, 0, 0)
        assert body["repetition_penalty"] == 1 and body["seed"] >= 0
    for server in servers:
        assert f"endpoint {server.address} serves the target, as 'target'" in run.said.getvalue()


def test_a_server_that_dies_and_comes_back_is_noticed_and_said(
    serve: Serve, run: Run, expected: dict[str, bytes]
) -> None:
    steady, dying = serve(pause=0.05), serve(pause=0.05)
    on = run.meanwhile(steady.address, dying.address, settings=replace(SETTINGS, in_flight=2))
    eventually(lambda: len(dying.asked) >= 3, on)
    steady.gate.clear()  # so that the rest is not answered before all of this has happened
    dying.die()
    run.wait_for(f"endpoint {dying.address} failed: Connection error", on)
    before = len(dying.asked)
    dying.live()
    run.wait_for(f"endpoint {dying.address} serves the target again", on)
    eventually(lambda: len(dying.asked) > before, on)
    steady.gate.set()
    on.result(timeout=20)
    assert content(run.output) == expected


def test_a_server_that_hangs_is_given_up_and_its_answers_are_asked_for_elsewhere(
    serve: Serve, run: Run, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MISSED_LOOKS", 1)
    steady, hanging = serve(pause=0.02), serve(pause=0.02)
    on = run.meanwhile(steady.address, hanging.address)
    eventually(lambda: len(hanging.asked) >= 3, on)
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.5)  # the others' looks may take their time
    steady.gate.clear()
    hanging.gate.clear()
    hanging.hanging.set()
    run.wait_for(f"endpoint {hanging.address} failed: 1 looks in a row failed: no answer", on)
    steady.gate.set()
    on.result(timeout=20)
    assert content(run.output) == expected


def test_an_answer_that_takes_too_long_is_asked_for_again(
    serve: Serve, run: Run, expected: dict[str, bytes]
) -> None:
    slow = []

    def failure(body: dict[str, Any]) -> None:
        if "seed" in body and not slow:
            slow.append(body)
            time.sleep(1.5)

    run(serve(failure=failure).address, limits=replace(LIMITS, request_timeout=1.0))
    assert slow and content(run.output) == expected
    assert re.search("failed: no answer within 1 s|timed out", run.said.getvalue())


def test_without_any_server_it_ends_with_what_each_of_them_said(serve: Serve, run: Run) -> None:
    servers = [serve(), serve(pause=0.05)]
    limits = replace(LIMITS, give_up_after=3.0)
    servers[0].die()
    on = run.meanwhile(*(s.address for s in servers), limits=limits)
    run.wait_for(f"endpoint {servers[0].address} does not answer", on)
    eventually(lambda: len(finished_shards(run.output)) >= 1, on)
    servers[1].gate.clear()
    servers[1].die()
    with pytest.raises(ConfigError, match=r"no endpoint has answered for 3 s: (http.*){2}Fin"):
        on.result(timeout=20)
    assert 0 < len(finished_shards(run.output)) < 7
    servers[0].live()
    run(servers[0].address)
    assert len(finished_shards(run.output)) == 7


def test_none_at_the_beginning_is_waited_for(
    serve: Serve, run: Run, expected: dict[str, bytes]
) -> None:
    server = serve()
    server.die()
    with pytest.raises(ConfigError, match=r"no endpoint has answered for 0\.2 s"):
        run(server.address, limits=replace(LIMITS, give_up_after=0.2))
    on = run.meanwhile(server.address)
    run.wait_for(f"endpoint {server.address} does not answer", on)
    server.live()
    on.result(timeout=20)
    assert content(run.output) == expected


def test_a_request_at_which_servers_fail_again_and_again_ends_the_run(
    serve: Serve, run: Run, tokenizer: Any
) -> None:
    poison = tokenizer("<s>user\nvalue 7 list 0<s>assistant\n")["input_ids"]

    def failure(body: dict[str, Any]) -> tuple[int, str] | None:
        return (500, "an assertion failed") if body["prompt"] == poison else None

    server = serve(failure=failure)
    with pytest.raises(ConfigError, match=r"conversation 7: 10 attempts .*500: .*assertion failed"):
        run(server.address)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"failure": lambda body: (400, "too long") if "seed" in body else None},
            "refuses .*too lo",
        ),
        ({"change": lambda c: c["choices"][0].update(token_ids=None)}, "returns no token ids"),
        (
            {"change": lambda c: c["choices"][0].update(finish_reason="length")},
            r"ends answers at \d+ tokens where 40 are asked for: start .* --generation-config vllm",
        ),
    ],
)
def test_what_no_other_attempt_would_mend_ends_the_run_at_once(
    serve: Serve, run: Run, values: dict[str, Any], message: str
) -> None:
    server = serve(**values)
    with pytest.raises(ConfigError, match=message):
        run(server.address, settings=replace(SETTINGS, in_flight=1))
    assert len(server.asked) <= 1


def test_a_server_with_other_weights_is_refused_at_the_beginning_and_left_out_later(
    serve: Serve, run: Run, expected: dict[str, bytes], tmp_path: Path
) -> None:
    right, wrong = serve(pause=0.02), serve(weights=1)
    with pytest.raises(ConfigError, match=r"has other weights than|another .* than"):
        run(right.address, wrong.address)
    (run.output / "served.json").unlink()
    file = tmp_path / "servers"
    file.write_text(right.address)
    on = run.meanwhile(str(file))
    eventually(lambda: len(right.asked) >= 3, on)
    right.gate.clear()
    file.write_text(f"{right.address}\n{wrong.address}\n")
    run.wait_for(f"endpoint {wrong.address} is left out: .* has other weights than", on)
    right.gate.set()
    on.result(timeout=20)
    assert not wrong.asked and content(run.output) == expected


def test_a_file_of_addresses_is_read_again(
    serve: Serve, run: Run, expected: dict[str, bytes], tmp_path: Path
) -> None:
    first, second = serve(pause=0.05), serve(pause=0.05)
    file = tmp_path / "servers"
    file.write_text(first.address)
    on = run.meanwhile(str(file), settings=replace(SETTINGS, in_flight=2))
    eventually(lambda: len(first.asked) >= 3, on)
    first.gate.clear()
    file.write_text("nonsense")
    run.wait_for("neither an address .*|not the address of a server.*of before are kept", on)
    file.write_text(second.address)
    run.wait_for(f"endpoint {first.address} is asked nothing more", on)
    asked = len(first.asked)
    first.gate.set()
    eventually(lambda: second.asked, on)
    on.result(timeout=20)
    assert len(first.asked) == asked, "what it was answering has been taken, and no more was asked"
    assert content(run.output) == expected


# The command


def write_prompts(path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": t} for t in c.turns]} for c in PROMPTS]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--endpoint", "http://a:1", "--dtype", "float32"],
            "--dtype: the servers that --endpoint",
        ),
        (["--endpoint", "http://a:1", "--engine-args", "{}"], "--engine-args: the servers that"),
        (["--endpoint", "http://a:1", "--drafter", "d"], "--drafter: the servers that --endpoint"),
        (["--endpoint", "nowhere"], "--endpoint nowhere: neither an address"),
        (["--give-up-after", "3"], "--give-up-after: of --endpoint; leave it out"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(
    options: list[str], message: str, target: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    command = ["generate-data", target, "--prompts", prompts, "--output", tmp_path / "data"]
    result = CliRunner().invoke(app, [*map(str, command), *options])
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())
