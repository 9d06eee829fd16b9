# SPDX-License-Identifier: Apache-2.0
"""Prompts that a made-up target writes itself: what is kept, and what a kill costs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.fake_engine import APPENDING, FakeEngine
from redrafter_testing.engines.generation_runs import make_folder, ran, with_extra_token
from vllm_redrafter.data import own_prompts
from vllm_redrafter.data import settings as data_settings
from vllm_redrafter.data.own_prompts import PromptSummary, make_prompts, place_of_turn
from vllm_redrafter.data.prompts import read_prompts
from vllm_redrafter.data.settings import PromptSettings, TargetSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

SETTINGS = PromptSettings(num_prompts=30, in_flight=4)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_prompts, "MIN_CHARACTERS", 6)


def run(target: Path, output: Path, settings: PromptSettings = SETTINGS, **engine: Any) -> Any:
    """The summary (None where it died) and the engines that were started."""
    return ran(make_prompts, str(target), output, settings=settings, **engine)


def texts(output: Path) -> list[str]:
    return [row["messages"][-1]["content"] for row in map(json.loads, output.open())]


def test_prompts_are_as_many_as_asked_for_and_all_different(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_settings, "MAX_PROMPT_TOKENS", 5)
    output = tmp_path / "deep" / "prompts.jsonl"
    summary, (engine,) = run(target, output)
    assert summary is not None
    found = texts(output)
    assert summary.prompts == len(found) == len(set(found)) == 30
    assert all(len(text) >= 6 for text in found)
    assert summary.short > 0 and summary.repeated > 0 and summary.unfinished > 0
    decode = partial(engine.tokenizer.decode, skip_special_tokens=True)
    ended = [answer for _, answer in engine.asked if answer.ended]
    assert set(found) <= {decode(answer.tokens).strip() for answer in ended}
    assert engine.closed and engine.most_in_flight == 4
    conversations, left_out = read_prompts(str(output))
    assert [c.turns for c in conversations] == [(text,) for text in found]
    assert not left_out.count


def test_the_target_is_asked_to_go_on_where_the_users_turn_begins(
    target: Path, tokenizer: Any, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, num_prompts=3, system_prompt="value")
    _, (engine,) = run(target, tmp_path / "prompts.jsonl", settings)
    turns = [turn for turn, _ in engine.asked]
    assert {tokenizer.decode(turn.prompt) for turn in turns} == {"<s>system\nvalue<s>user\n"}
    assert {turn.stop_token for turn in turns} == {tokenizer.convert_tokens_to_ids("<s>")}
    assert len({turn.seed for turn in turns}) == len(turns)
    (row, *_) = map(json.loads, (tmp_path / "prompts.jsonl").open())
    assert row["messages"][0] == {"role": "system", "content": "value"}


def test_a_file_is_continued_to_the_same_prompts_and_by_the_same_settings_alone(
    target: Path, tmp_path: Path
) -> None:
    run(target, tmp_path / "whole.jsonl")
    output = tmp_path / "parts.jsonl"
    killed, _ = run(target, output, answers_until_killed=17, order=3)
    assert killed is None
    before = len(texts(output))
    with output.open("a") as file:
        file.write('{"messages": [{"role": "us')
    summary, _ = run(target, output, replace(SETTINGS, in_flight=9), order=5)
    assert summary is not None
    assert 0 < before == summary.found == 30 - summary.prompts
    whole = output.read_bytes()
    assert whole == (tmp_path / "whole.jsonl").read_bytes()
    assert run(target, output) == (PromptSummary(found=30), [])
    with pytest.raises(ConfigError, match=r"made with other settings.*seed: 0, not 1"):
        run(target, output, replace(SETTINGS, num_prompts=40, target=TargetSettings(seed=1)))
    assert output.read_bytes() == whole
    summary, _ = run(target, output, replace(SETTINGS, num_prompts=35))
    assert summary is not None and summary.prompts == 5
    assert len(set(texts(output))) == 35


def test_a_template_that_is_missing_refuses_or_hides_the_turn_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    refusal = "a user's turn: the target's chat template refuses it: no system message; "
    with pytest.raises(ConfigError, match=rf"^{refusal}leave --system-prompt out$"):
        place_of_turn(tokenizer, "value")
    for template, message in (
        (None, r"no chat template.*generate-data --prompts of your own"),
        (tokenizer.chat_template, rf"^{refusal}give generate-data --prompts of your"),
        ("{{ messages[0]['content'] }}", "does not show where the user's turn ends"),
        ("{{ messages[0]['content'] }} ASSISTANT:", "ends the user's turn with mere text"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=message):
            place_of_turn(tokenizer, None)


def test_a_target_without_embeddings_of_what_precedes_the_turn_is_refused(tmp_path: Path) -> None:
    extra = with_extra_token(make_folder(tmp_path / "target", APPENDING))
    with pytest.raises(ConfigError, match=r"chat template or the system .* \(id 512\) has no row"):
        run(extra, tmp_path / "p.jsonl", replace(SETTINGS, system_prompt="<|extra|>"))
    assert not (tmp_path / "p.jsonl").exists()


def test_a_target_with_nothing_new_to_say_ends_the_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_prompts, "PATIENCE", 50)
    monkeypatch.setattr(own_prompts, "MIN_CHARACTERS", 1)

    class Dull(FakeEngine):
        def answer(self, request: OpenTurn) -> TurnAnswer:
            return super().answer(replace(request, seed=0))

    with pytest.raises(ConfigError, match="50 attempts brought no new prompt"):
        run(target, tmp_path / "prompts.jsonl", kind=Dull)
    assert len(texts(tmp_path / "prompts.jsonl")) == 1
