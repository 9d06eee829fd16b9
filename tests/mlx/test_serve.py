# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's server with a drafter, and mlx-lm's own beside it: a process each, the same requests."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from redrafter_testing.engines.server import free_port, started
from redrafter_testing.models.reciting_target import ANSWERS, make_reciting_pair
from redrafter_testing.models.tiny_models import add_tokenizer, make_drafter, make_target
from redrafter_testing.requests.chat_client import (
    Message,
    answer,
    refusal,
    said,
)
from vllm_redrafter.utils.errors import ConfigError

mx = pytest.importorskip("mlx.core")


from vllm_redrafter.mlx.serve import serve, target_and_drafter

QUESTIONS = [*ANSWERS, "value 3", "names of lists"]
OFFLINE = {"HF_HUB_OFFLINE": "1"}


SERVE = """
import sys
from vllm_redrafter.mlx.serve import serve

# The budget would go by the clock, and may draft nothing on a busy machine.
serve(*sys.argv[1:3], sys.argv[3:], {"adaptive": False})
"""


class Servers(NamedTuple):
    """Addresses of two servers of the same target, and the log of the first."""

    ours: str
    plain: str
    log: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_reciting_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def servers(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("served")
    target, drafter = map(str, pair)
    log = folder / "ours.log"
    with (
        log.open("w") as output,
        started(["-c", SERVE, target, drafter], OFFLINE, stdout=output, stderr=output) as ours,
        started(["-m", "mlx_lm", "server", "--model", target], OFFLINE) as plain,
    ):
        yield Servers(ours, plain, log)


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_those_of_mlx_lms_own_server(servers: Servers, question: str) -> None:
    ours, plain = (
        answer(address, said(question), max_tokens=50) for address in (servers.ours, servers.plain)
    )
    for usage in (ours["usage"], plain["usage"]):
        del usage["prompt_tokens_details"]  # the two caches hold what other tests asked
    assert ours == plain


def test_steps_have_several_tokens(servers: Servers) -> None:
    """Else none of these tests would be one of trees."""
    answer(servers.ours, said("names"), max_tokens=40)
    tokens, steps = steps_of_last_answer(servers.log)
    assert 2 * steps < tokens


@pytest.mark.parametrize("stop", [" 2", " 3,", "value 5", ", value 8", "13"])
def test_an_answer_ends_at_a_stop_string_wherever_in_a_step(servers: Servers, stop: str) -> None:
    asks = [(servers.ours, stop), (servers.plain, stop), (servers.ours, [])]
    ours, plain, whole = (
        answer(address, said("list values"), max_tokens=50, stop=words)["choices"][0]
        for address, words in asks
    )
    assert ours == plain
    assert ours["finish_reason"] == "stop"
    assert len(ours["message"]["content"]) < len(whole["message"]["content"])
    # The prompt cache has what was in use when it stopped, and no more.
    again = answer(servers.ours, said("list values"), max_tokens=50)["choices"][0]
    assert again == whole


def test_the_next_turn_reuses_what_the_trees_left(servers: Servers) -> None:
    messages = said("list values please")
    for question in ("names", "list values", "value 3"):
        ours, plain = (
            answer(address, messages, max_tokens=30) for address in (servers.ours, servers.plain)
        )
        assert ours["choices"] == plain["choices"]
        text = ours["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, *said(question)]
        before, found = ours["usage"], cached_tokens(servers.ours, messages)
        # All but the last token, which no step has read: the prompt's, and those of its answer.
        assert before["prompt_tokens"] + before["completion_tokens"] - 1 <= found


def test_a_tool_is_called(servers: Servers) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    (choice,) = answer(servers.ours, said("weather in Paris"), tools=tools)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3}


def test_what_a_request_may_not_say_is_told_to_the_client(servers: Servers) -> None:
    assert "--spec-tokens" in refusal(servers.ours, said("names"), num_draft_tokens=2)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    message = {"role": "user", "content": [image]}
    assert "images are refused" in refusal(servers.ours, [message])


def test_a_drafter_that_records_its_target_is_enough(tmp_path: Path) -> None:
    target, drafter = make_target(tmp_path / "target"), make_drafter(tmp_path / "drafter")
    assert target_and_drafter(str(target), None) == (str(target), None)
    assert target_and_drafter(str(target), str(drafter)) == (str(target), str(drafter))
    with pytest.raises(ConfigError, match="does not say for which target it is: name the target"):
        target_and_drafter(str(drafter), None)
    config = json.loads((drafter / "config.json").read_text())
    config["speculators_config"]["verifier"] = {"name_or_path": str(target)}
    (drafter / "config.json").write_text(json.dumps(config))
    assert target_and_drafter(str(drafter), None) == (str(target), str(drafter))
    with pytest.raises(ConfigError, match="is a drafter itself"):
        target_and_drafter(str(drafter), str(drafter))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-bits", "4"], r"--kv-bits is refused: .* full precision"),
        (["--draft-model", "x"], r"--draft-model is refused: say --drafter"),
        (["--num-draft-tokens", "4"], r"--num-draft-tokens is refused: say --spec-tokens"),
        (["--pipeline"], r"--pipeline is refused: a drafter runs in one process"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_kept_of_the_arguments_is_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    target = make_target(tmp_path / "target")
    with pytest.raises(ConfigError, match=message):
        serve(str(target), None, arguments, {})


def test_a_drafter_that_does_not_fit_ends_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm's server would go on, and answer nothing."""
    target = make_target(tmp_path / "target")
    add_tokenizer(target)
    drafter = make_drafter(tmp_path / "drafter", hidden_size=64)
    with pytest.raises(ConfigError, match=r"does not fit this target"):
        serve(str(target), str(drafter), ["--port", str(free_port())], {})
    assert not [record for record in caplog.records if record.exc_info], "a traceback was logged"


def test_a_target_of_which_another_ones_weights_would_be_loaded_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "run[1]")
    add_tokenizer(target)
    with pytest.raises(ConfigError, match=r"run\[1\]': .* are a pattern where .* rename the fold"):
        serve(str(target), None, ["--port", str(free_port())], {})


def steps_of_last_answer(log: Path) -> tuple[int, int]:
    """Its tokens and steps, as the server logged them."""
    tokens, steps = re.findall(r"ReDrafter: (\d+) tokens in (\d+) steps", log.read_text())[-1]
    return int(tokens), int(steps)


def cached_tokens(address: str, messages: Sequence[Message]) -> int:
    """How many of these messages' tokens are in the server's prompt cache."""
    usage = answer(address, messages, max_tokens=1)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])
