# SPDX-License-Identifier: Apache-2.0
"""Generation with a target that is made up: what is asked and kept, and what a kill costs."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING, FakeEngine
from redrafter_testing.engines.generation_runs import (
    PROMPTS,
    SETTINGS,
    content,
    make_folder,
    run,
    with_extra_token,
)
from redrafter_testing.models.tiny_models import make_target
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.dataset import DatasetInfo, read_dataset
from vllm_redrafter.data.settings import (
    CaptureSettings,
    EngineSettings,
    GenerationSettings,
    SamplingSettings,
)
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

SINGLE = [Conversation(c.turns[:1], source=c.source) for c in PROMPTS]


@pytest.mark.parametrize("name", ["appending", "rewriting"])
def test_marked_tokens_are_what_the_target_wrote_in_just_that_context(
    name: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    summary, engine = run(targets[name], tmp_path)
    answers = {(r.conversation, *r.prompt): answer for r, answer in engine.asked}
    info, data = read_dataset(tmp_path)
    found = []
    for row in data:
        tokens, mask = row["input_ids"], row["assistant_mask"]
        assert not mask[0]
        starts = [i for i, marked in enumerate(mask) if marked and not mask[i - 1]]
        for start in starts:
            end = [*mask, False].index(False, start)
            found.append((row["conversation"], *tokens[:start]))
            assert tokens[start:end] == answers[found[-1]].tokens
    assert sorted(found) == sorted(answers)
    assert sorted(data["conversation"]) == list(data["conversation"]), "in the order of the prompts"
    assert (info.num_conversations, info.vocab_size) == (11, 512)
    assert engine.most_in_flight == 4, "continuous over the borders of shards, but no more"
    assert summary is not None
    assert (summary.conversations, summary.rows) == (11, len(data))
    assert summary.answers == len(answers) == sum(len(c.turns) for c in PROMPTS)
    assert summary.tokens == sum(map(sum, data["assistant_mask"]))
    assert (summary.truncated, summary.skipped, summary.cut_answers) == (0, 0, 0)


def test_what_only_a_template_could_express_is_left_out_or_refused(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="1 user turns and a system message, but"):
        run(targets["plain"], tmp_path, [replace(SINGLE[0], system="Be brief.")])
    with pytest.raises(ConfigError, match="--system-prompt: the target's tokenizer has no chat"):
        run(targets["plain"], tmp_path, SINGLE, replace(SETTINGS, system_prompt="Be brief."))
    assert not list(tmp_path.iterdir())
    shown = io.StringIO()
    run(targets["plain"], tmp_path, PROMPTS, console=Console(file=shown))
    refusal = r"rows that only a .*: 7, the first: line 1: a conversation of 2 user turns, but "
    assert re.search(refusal, shown.getvalue())
    assert read_dataset(tmp_path)[0].num_conversations == 4


@pytest.mark.parametrize(
    ("template", "prompts", "message"),
    [
        (
            "{% if messages[2:] %}{{ raise_exception('one turn') }}{% endif %}" + APPENDING,
            PROMPTS[1:3],
            "there are no prompts to answer: rows that the target's .* line 1: the target's chat "
            "template refuses it: one turn",
        ),
        ("{{ '' }}", SINGLE, "line 0: the prompt 'value 0 list 0' has no tokens"),
    ],
)
def test_a_conversation_that_cannot_be_written_is_named_before_anything_starts(
    tmp_path: Path, template: str, prompts: list[Conversation], message: str
) -> None:
    target = make_folder(tmp_path / "target", template)
    with pytest.raises(ConfigError, match=message):
        run(target, tmp_path / "data", prompts)
    assert not (tmp_path / "data").exists()


def test_an_answer_that_spells_a_token_without_an_embedding_ends_its_conversation(
    tmp_path: Path,
) -> None:
    target = with_extra_token(make_folder(tmp_path / "target", APPENDING))

    class Spelling(FakeEngine):
        def answer(self, request: OpenTurn) -> TurnAnswer:
            said = super().answer(request)
            if request.conversation != 1:
                return said
            spelt = [self.tokenizer(part)["input_ids"] for part in ("<|ex", "tra|>")]
            return replace(said, tokens=[*spelt[0], *spelt[1]], ended=True)

    summary, engine = run(target, tmp_path / "data", PROMPTS[:3], kind=Spelling)
    assert summary is not None and summary.skipped == summary.truncated == 0
    ended = "ended early: rows with a token that has no embedding: 1, the first: line 1: "
    assert ended in str(summary)
    assert sorted(request.conversation for request, _ in engine.asked) == [0, 1, 2, 2, 2]


def test_the_system_prompt_is_for_conversations_without_their_own(
    target: Path, tmp_path: Path
) -> None:
    prompts = [SINGLE[0], replace(SINGLE[1], system="name 1")]
    settings = replace(SETTINGS, system_prompt="value 9")
    _, engine = run(target, tmp_path, prompts, settings)
    texts = {engine.tokenizer.decode(request.prompt) for request, _ in engine.asked}
    assert {text.split("<s>")[1] for text in texts} == {"system\nvalue 9", "system\nname 1"}


def test_what_is_longer_than_the_model_allows_is_skipped_or_truncated_and_counted(
    target: Path, tmp_path: Path
) -> None:
    words = " ".join(["value"] * 60)
    prompts = [
        Conversation((words, "value 1"), source="too long"),
        Conversation(("value 1", words), source="its second turn is"),
        Conversation(("value 2",), source="fits"),
    ]
    summary, engine = run(target, tmp_path, prompts, max_model_len=48)
    assert summary is not None
    assert (summary.skipped, summary.truncated, summary.conversations) == (1, 1, 3)
    info, data = read_dataset(tmp_path)
    assert list(data["conversation"]) == [1, 2]
    assert sorted(request.conversation for request, _ in engine.asked) == [1, 2]
    assert "1 conversations were truncated and 1 skipped" in str(summary)
    assert info.num_conversations == 3


def test_answers_that_reach_a_limit_are_counted_and_lack_eos(target: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, sampling=SamplingSettings(max_tokens=3))
    summary, engine = run(target, tmp_path / "max", PROMPTS, settings)
    cut = [answer for _, answer in engine.asked if not answer.ended]
    assert summary is not None and summary.cut_answers == len(cut) > 0
    assert all(len(a.tokens) == 3 and engine.tokenizer.eos_token_id not in a.tokens for a in cut)
    assert summary.truncated == 0

    room = len(engine.tokenizer("<s>user\nvalue 2 list 0<s>assistant\n")["input_ids"]) + 1
    summary, engine = run(target, tmp_path / "room", [PROMPTS[2]], max_model_len=room)
    assert summary is not None and (summary.truncated, summary.cut_answers) == (1, 0)
    assert [len(answer.tokens) for _, answer in engine.asked] == [1], "no turn follows"


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SamplingSettings, {"temperature": -0.1}, "^--temperature must be .*, got -0.1"),
        (SamplingSettings, {"top_p": 0.0}, r"^--top-p must be .*, got 0\.0"),
        (SamplingSettings, {"max_model_len": 1}, "^--max-model-len must be .*, got 1"),
        (GenerationSettings, {"shard_size": 0}, "^--shard-size must be at least 1, got 0"),
        (GenerationSettings, {"part": "3/2"}, "^--part must be k/n"),
        (CaptureSettings, {"max_length": 1}, "^--max-length must be at least 2"),
        (CaptureSettings, {"target_layers": "2,1"}, "^--target-layers must be .* ascending"),
        (CaptureSettings, {"dtype": "int8"}, "^--dtype must be one of auto, float32, bfloat16"),
        (EngineSettings, {"engine_args": "[1]"}, "^--engine-args .*no object; give one"),
        (EngineSettings, {"tensor_parallel_size": 0}, "^--tensor-parallel-size must be at "),
    ],
)
def test_values_out_of_range_are_refused(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)


@pytest.mark.parametrize("name", ["appending", "rewriting"])
@pytest.mark.parametrize("order", [0, 1])
def test_killed_runs_continue_to_the_data_of_an_uninterrupted_one(
    name: str, order: int, targets: dict[str, Path], tmp_path: Path
) -> None:
    _, whole = run(targets[name], tmp_path / "whole")
    expected = content(tmp_path / "whole")
    assert len(expected) == 4
    output, kept, asked = tmp_path / "killed", {}, 0
    # A few answers at a time: kills fall inside and between shards.
    for attempt in range(len(whole.asked)):
        summary, engine = run(targets[name], output, order=order, answers_until_killed=5 + attempt)
        asked += len(engine.asked)
        now = content(output)
        assert all(now[shard] == data for shard, data in kept.items())
        missing = {c // 3 for c in (r.conversation for r, _ in engine.asked)}
        finished_before = {int(shard[6:11]) for shard in kept}
        assert not missing & finished_before, "a finished shard must not be asked for again"
        kept = now
        if summary is not None:
            break
        (output / ".shard-00003.parquet.tmp").write_bytes(b"half")
    assert attempt >= 2 and asked > len(whole.asked)
    assert content(output) == expected


def test_parts_write_the_whole_together_and_each_is_continued(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path / "whole")
    expected, parts = content(tmp_path / "whole"), tmp_path / "parts"

    def part(text: str, **engine: Any) -> tuple[set[int], str]:
        """Of which shards conversations were asked for; what was printed."""
        settings, console = replace(SETTINGS, part=text), Console(file=io.StringIO(), width=200)
        _, asked = run(target, parts, settings=settings, console=console, **engine)
        return {request.conversation // 3 for request, _ in asked.asked}, console.file.getvalue()

    asked, printed = part("2/2", answers_until_killed=8)
    assert asked == {1, 3} and "1 of 4 shards are finished" in printed
    assert "the same command continues" in printed
    asked, printed = part("1/2")
    assert asked == {0, 2} and "3 of 4 shards are finished" in printed
    assert "other parts are missing still" in printed
    with pytest.raises(ConfigError, match=r"1 of 4 shards are missing, shard-00001\.parquet first"):
        read_dataset(parts)
    asked, printed = part("2/2")
    assert asked == {1} and "4 of 4 shards are finished" in printed and ";" not in printed
    assert content(parts) == expected
    assert part("5/5")[0] == set(), "of more parts than shards, some have none"
    summary, engine = run(target, parts)
    assert not engine.asked and not engine.closed, "a finished folder needs no engine"
    assert summary is not None and (summary.conversations, summary.kept_shards) == (0, 4)


def test_rows_that_are_left_out_are_so_in_every_run(tmp_path: Path) -> None:
    target = with_extra_token(make_folder(tmp_path / "target", APPENDING))
    bad = [Conversation((f"value <|extra|> {i}",), source=f"bad line {i}") for i in range(4)]
    prompts = [bad[0], *PROMPTS[:3], bad[1], bad[2], *PROMPTS[3:], bad[3]]
    run(target, tmp_path / "good")
    output = tmp_path / "data"
    run(target, output, prompts, answers_until_killed=5)
    assert len(DatasetInfo.finished_shards(output)) < 4
    run(target, output, PROMPTS, order=2)
    assert content(output) == content(tmp_path / "good")
    assert DatasetInfo.load(output) == DatasetInfo.load(tmp_path / "good")


def test_data_of_other_settings_prompts_or_another_target_is_not_continued(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    target, output = targets["appending"], tmp_path / "data"
    run(target, output, answers_until_killed=12)
    before = content(output)
    assert before
    other = make_target(tmp_path / "other", seed=1)
    AutoTokenizer.from_pretrained(target).save_pretrained(other)
    colder = SamplingSettings(max_tokens=40, temperature=0.5)
    for name, prompts, change, message in (
        (target, PROMPTS, {"sampling": colder}, r"temperature: 1\.0, not 0\.5"),
        (target, PROMPTS, {"shard_size": 4}, "shard_size: 3, not 4"),
        (target, PROMPTS, {"system_prompt": "Be brief."}, "system_prompt: None, not 'Be brief.'"),
        (target, PROMPTS[::-1], {}, "prompts_fingerprint: '"),
        (targets["rewriting"], PROMPTS, {}, "template_fingerprint: '"),
        (other, PROMPTS, {}, r"target_fingerprint: '\w+', not '\w+'"),
    ):
        with pytest.raises(ConfigError, match=rf"these: {message}.*Give the former settings or an"):
            run(name, output, prompts, replace(SETTINGS, **change))
    assert content(output) == before
    run(target, output, settings=replace(SETTINGS, in_flight=2))
    assert len(content(output)) == 4
