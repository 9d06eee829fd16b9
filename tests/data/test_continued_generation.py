# SPDX-License-Identifier: Apache-2.0
"""Generation that is stopped and goes on, in one part or several: what a kill costs."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
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
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.utils.errors import ConfigError


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
