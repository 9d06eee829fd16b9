# SPDX-License-Identifier: Apache-2.0
"""A server that answers, fails, ends or serves something else: an engine's data, or an error."""

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redrafter_testing.engines import generation_runs
from redrafter_testing.engines.fake_server import FakeServer
from redrafter_testing.engines.generation_runs import content
from vllm_redrafter.cli.main import app
from vllm_redrafter.data import endpoints
from vllm_redrafter.data.dataset import DatasetInfo
from vllm_redrafter.data.endpoints import EndpointEngine, parsed_address
from vllm_redrafter.data.settings import GenerationSettings, SamplingSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError

PROMPTS = generation_runs.prompts(20)

Serve = Callable[..., FakeServer]


@pytest.fixture(scope="module")
def expected(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one engine in this process writes."""
    output = tmp_path_factory.mktemp("expected")
    generation_runs.run(target, output, PROMPTS)
    return content(output)


OPENED = cache(Target.open)


@pytest.fixture(autouse=True)
def _opened_once_and_without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "open", OPENED)
    monkeypatch.setattr(endpoints, "RETRIES", 0)


@pytest.fixture
def serve(tokenizer: Any) -> Iterator[Serve]:
    """Starts servers, which end with the test."""
    servers: list[FakeServer] = []

    def start(**values: Any) -> FakeServer:
        servers.append(FakeServer(values.pop("tokenizer", tokenizer), **values))
        return servers[-1]

    yield start
    for server in servers:
        server.die()


class Run:
    """The command."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.output = folder / "data"
        rows = [{"messages": [{"role": "user", "content": t} for t in c.turns]} for c in PROMPTS]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = f"--prompts={folder / 'prompts.jsonl'}", f"--output={self.output}"
        self._command = ["generate-data", str(target), *files, "--max-tokens=40", "--shard-size=3"]

    def __call__(self, server: FakeServer | None, options: Sequence[str] = ()) -> None:
        """ConfigError: it ends with one."""
        if server:
            options = ["--endpoint", server.address, "--in-flight=4"]
        command = [*self._command, *options]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "1000"})
        if result.exit_code:
            raise ConfigError(result.stderr)


@pytest.fixture
def run(target: Path, tmp_path: Path) -> Run:
    return Run(target, tmp_path)


def answers_from(begin: int) -> Callable[[dict[str, Any]], Any]:
    """Failures of a server from the given request for an answer on."""
    asked: list[dict[str, Any]] = []

    def failure(body: dict[str, Any]) -> tuple[int, str] | None:
        asked.append(body)
        return (500, "an assertion failed") if len(asked) >= begin else None

    return failure


def test_a_server_writes_what_an_engine_in_this_process_writes(
    serve: Serve, run: Run, expected: dict[str, bytes]
) -> None:
    server = serve(pause=0.01)
    run(server)
    assert content(run.output) == expected
    assert 1 < server.most_at_once <= 4
    for body in server.asked:
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1, 1, 0, 0)
        assert body["repetition_penalty"] == 1 and body["seed"] >= 0


def test_a_server_that_fails_ends_the_run_which_is_continued_with_another(
    serve: Serve, run: Run, expected: dict[str, bytes]
) -> None:
    failing = serve(failure=answers_from(15))
    with pytest.raises(ConfigError, match=r"status 500: .*an assertion failed.*same command again"):
        run(failing)
    assert 0 < len(DatasetInfo.finished_shards(run.output)) < 7
    failing.die()
    with pytest.raises(ConfigError, match=r"endpoint http.*: Connection error"):
        run(failing)
    run(serve())
    assert content(run.output) == expected


AT = r"endpoint http://127\.0\.0\.1:\d+:? "


def changed(**values: Any) -> dict[str, Any]:
    return {"change": lambda completion: completion["choices"][0].update(values)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            changed(finish_reason="length"),
            r"at \d+ tokens where 40 are .* --generation-config vllm",
        ),
        (changed(prompt_token_ids=[1]), f"{AT}.*: ValueError.*another prompt than"),
        (changed(token_ids=None), f"{AT}.* not vLLM's: TypeError"),
        ({"change": lambda completion: completion.pop("choices")}, f"{AT}.* answer is not vLLM's"),
        ({"failure": lambda body: (400, "too much")}, f"{AT}refuses a request: .*too much"),
        ({"failure": lambda body: (401, "who?")}, rf"{AT}.*who\?.*its key goes into OPENAI_API_KE"),
        ({"failure": lambda body: (503, "loading")}, f"{AT}status 503: .*loading"),
        ({"failure": lambda body: time.sleep(3)}, f"{AT}(no answer within 1 s|Request timed out)"),
    ],
)
def test_what_a_server_does_wrong_ends_the_run_and_is_named(
    serve: Serve, run: Run, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "ANSWER_SECONDS", 1.0)
    with pytest.raises(ConfigError, match=message):
        run(serve(**values))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint=http://a:1", "--dtype=float32"], "--dtype: the server that --endpoint"),
        (["--endpoint=nowhere"], "--endpoint nowhere: not the address of a server"),
        (["--served-name=a"], "--served-name: of --endpoint; leave it out"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(
    options: list[str], message: str, run: Run
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(None, options)


@pytest.fixture
def check(target: Path, serve: Serve) -> Callable[..., str]:
    """The name of the target at a server of these values."""

    def look(length: int | None = None, served_name: str | None = None, **values: Any) -> str:
        settings = GenerationSettings(SamplingSettings(max_model_len=length))
        address, opened = serve(**values).address, Target.open(target)
        engine = EndpointEngine(address, opened, settings, served_name)
        engine.close()
        return engine.model

    return look


def test_the_target_is_known_by_its_name_or_its_folder_s(check: Callable[..., str]) -> None:
    assert check(length=200, max_model_len=200) == check() == "target"
    assert check(name="org/target", root="elsewhere") == "org/target"
    assert check(name="alias", root="/models/target/") == "alias"
    assert check(name="alias", root="elsewhere", served_name="alias") == "alias"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "other", "root": "/models/other"}, f"{AT}serves 'other' .*, not '.*target'; if "),
        ({"served_name": "alias"}, f"{AT}serves 'target' .*, not 'alias'"),
        ({"max_model_len": 511}, f"{AT}allows 511 tokens, and 512 may be asked for: give --max-m"),
    ],
)
def test_what_does_not_fit_is_named(
    check: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(**values)


def test_another_tokenizer_is_noticed(check: Callable[..., str], tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["tower"])
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*: the same text begins"):
        check(tokenizer=other)


@pytest.mark.parametrize("given", ["http://a:8000/", "http://a:8000/v1/", "http://a:8000"])
def test_an_address_loses_the_path_of_the_api_and_others_are_refused(given: str) -> None:
    assert parsed_address(given) == "http://a:8000"
    for wrong in ("", "localhost:8000", "ftp://a:1", "http://", "http://a:port", "http://a:1?x=1"):
        with pytest.raises(ConfigError, match=r"--endpoint .*: not the address of a server; give"):
            parsed_address(wrong)
