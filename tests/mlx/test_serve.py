# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's server with a drafter, and mlx-lm's own beside it: a process each, the same requests."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from redrafter_testing.engines.server import free_port
from redrafter_testing.models.checkpoints import edit_config
from redrafter_testing.models.reciting_target import ANSWERS
from redrafter_testing.models.tiny_models import make_drafter, make_target, make_worded_target
from redrafter_testing.requests.chat_client import answer, said
from vllm_redrafter.mlx.serve import PromptCache, serve, target_and_drafter
from vllm_redrafter.utils.errors import ConfigError

QUESTIONS = [*ANSWERS, "value 3", "names of lists"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_those_of_mlx_lms_own_server(servers: Any, question: str) -> None:
    ours, plain = (
        answer(address, said(question), max_tokens=50) for address in (servers.ours, servers.plain)
    )
    for usage in (ours["usage"], plain["usage"]):
        del usage["prompt_tokens_details"]  # the two caches hold what other tests asked
    assert ours == plain


def test_steps_have_several_tokens(servers: Any) -> None:
    """Else none of these tests would be one of trees."""
    answer(servers.ours, said("names"), max_tokens=40)
    logged = re.findall(r"ReDrafter: (\d+) tokens in (\d+) steps", servers.log.read_text())
    tokens, steps = map(int, logged[-1])
    assert 2 * steps < tokens


@pytest.mark.parametrize("stop", [" 2", " 3,", "value 5", ", value 8", "13"])
def test_an_answer_ends_at_a_stop_string_wherever_in_a_step(servers: Any, stop: str) -> None:
    asks = [(servers.ours, stop), (servers.plain, stop), (servers.ours, [])]
    ours, plain, whole = (
        answer(address, said("list values"), max_tokens=50, stop=words)["choices"][0]
        for address, words in asks
    )
    assert ours == plain
    assert ours["finish_reason"] == "stop"
    assert len(ours["message"]["content"]) < len(whole["message"]["content"])
    # The prompt cache has what was in use when it stopped, and no more.
    assert answer(servers.ours, said("list values"), max_tokens=50)["choices"][0] == whole


def test_the_next_turn_reuses_what_the_trees_left(servers: Any) -> None:
    messages = said("list values please")
    for question in ("names", "list values", "value 3"):
        ours, plain = (
            answer(address, messages, max_tokens=30) for address in (servers.ours, servers.plain)
        )
        assert ours["choices"] == plain["choices"]
        text = ours["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, *said(question)]
        before, after = ours["usage"], answer(servers.ours, messages, max_tokens=1)["usage"]
        found = after["prompt_tokens_details"]["cached_tokens"]
        # All but the last token, which no step has read: the prompt's, and those of its answer.
        assert before["prompt_tokens"] + before["completion_tokens"] - 1 <= found


def test_a_tool_is_called(servers: Any) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    (choice,) = answer(servers.ours, said("weather in Paris"), tools=tools)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3}


def test_a_drafter_that_records_its_target_is_enough(tmp_path: Path) -> None:
    target, drafter = make_target(tmp_path / "target"), make_drafter(tmp_path / "drafter")
    assert target_and_drafter(str(target), None) == (str(target), None)
    assert target_and_drafter(str(target), str(drafter)) == (str(target), str(drafter))
    with pytest.raises(ConfigError, match="does not say for which target it is: name the target"):
        target_and_drafter(str(drafter), None)
    verifier = {"verifier": {"name_or_path": str(target)}}
    edit_config(drafter, lambda values: values["speculators_config"].update(verifier))
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


@pytest.mark.parametrize(
    ("name", "hidden_size", "message"),
    [
        ("target", 64, "does not fit this target"),
        ("run[1]", 128, r"run\[1\]': .* are a pattern where .* rename the fold"),
    ],
)
def test_what_cannot_be_loaded_ends_the_command(
    name: str, hidden_size: int, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm's server would go on, and answer nothing."""
    target = make_worded_target(tmp_path / name)
    drafter = make_drafter(tmp_path / "drafter", hidden_size=hidden_size)
    with pytest.raises(ConfigError, match=message):
        serve(str(target), str(drafter), ["--port", str(free_port())], {})
    assert not [record for record in caplog.records if record.exc_info], "a traceback was logged"


@pytest.mark.parametrize(
    ("asked", "reused"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 6),
        ([1, 2, 3, 4, 5, 6], 5),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 9], 3),
        ([1, 2], 1),
    ],
    ids=["goes on", "the same", "all that is there", "another turn", "a part"],
)
def test_a_cached_prompt_has_the_tokens_that_it_is_named_by(asked: list[int], reused: int) -> None:
    layers, cache, rows = [KVCache(), KVCache()], PromptCache(), mx.arange(1.0, 7.0)[:, None]
    for layer in layers:
        layer.update_and_fetch(rows[None, None], rows[None, None])
    cache.insert_cache("model", [1, 2, 3, 4, 5, 6], layers)
    found, rest = cache.fetch_nearest_cache("model", asked)
    assert found is not None and found.tokens == asked[:reused] and rest == asked[reused:]
    for layer in found:
        assert layer.keys[..., : layer.offset, :].flatten().tolist() == asked[:reused]
