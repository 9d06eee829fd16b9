"""Generation that is stopped and goes on, by one client or several: what a kill costs."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
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
from redrafter_testing.in_background import in_background
from redrafter_testing.models.tiny_models import make_target
from vllm_redrafter.data import generation
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.dataset import DatasetInfo, finished_shards
from vllm_redrafter.data.generation import GenerationSummary, generate_data
from vllm_redrafter.data.generation_settings import GenerationSettings, SamplingSettings
from vllm_redrafter.data.leases import ShardLeases
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


def test_data_does_not_depend_on_the_order_in_which_answers_are_finished(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    orders: list[list[int]] = []
    for order, in_flight in ((0, 4), (1, 4), (2, 11), (0, 1)):
        settings = replace(SETTINGS, in_flight=in_flight)
        output = tmp_path / f"{order}-{in_flight}"
        _, engine = run(targets["appending"], output, settings=settings, order=order)
        orders.append([request.conversation for request, _ in engine.asked])
        assert content(output) == content(tmp_path / "0-4")
    assert len(set(map(tuple, orders))) == len(orders)


def test_a_finished_folder_needs_no_engine(targets: dict[str, Path], tmp_path: Path) -> None:
    run(targets["appending"], tmp_path)
    console = Console(file=io.StringIO())
    summary, engine = run(targets["appending"], tmp_path, console=console)
    assert not engine.asked and not engine.closed
    assert summary is not None and (summary.conversations, summary.kept_shards) == (0, 4)
    assert "is complete: 4 shards" in " ".join(console.file.getvalue().split())


def test_a_missing_shard_in_the_middle_is_written_again(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    run(targets["appending"], tmp_path)
    expected = content(tmp_path)
    (tmp_path / "shard-00001.parquet").unlink()
    summary, engine = run(targets["appending"], tmp_path)
    assert content(tmp_path) == expected
    assert {request.conversation for request, _ in engine.asked} == {3, 4, 5}
    assert summary is not None and summary.kept_shards == 3
    assert "3 shards were there already" in str(summary)


def in_threads(*works: Callable[[], None]) -> None:
    """Do all at once; what one raises is raised here."""
    for future in [in_background(work) for work in works]:
        future.result(timeout=60)


@pytest.mark.parametrize("clients", [2, 3])
def test_several_clients_write_one_folder_together(
    clients: int,
    targets: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "LOOK_SECONDS", 0.01)
    settings = replace(SETTINGS, shard_size=1, in_flight=2)
    run(targets["appending"], tmp_path / "one", settings=settings)
    output, together = tmp_path / "several", Barrier(clients, timeout=20)
    found: list[tuple[GenerationSummary | None, FakeEngine]] = []

    def client(order: int) -> None:
        together.wait()
        found.append(run(targets["appending"], output, settings=settings, order=order, pause=0.01))

    in_threads(*(partial(client, order) for order in range(clients)))
    assert content(output) == content(tmp_path / "one")
    asked = [{request.conversation for request, _ in engine.asked} for _, engine in found]
    assert all(asked) and set.union(*asked) == set(range(11))
    assert sum(map(len, asked)) == 11, "no conversation is asked for by two"
    for summary, engine in found:
        assert summary is not None and summary.kept_shards == 0
        assert summary.others_shards == 11 - summary.conversations > 0
        assert summary.conversations == len({r.conversation for r, _ in engine.asked})
        assert "were written by other clients meanwhile" in str(summary)
    assert {path.suffix for path in output.iterdir()} == {".parquet", ".json"}


def test_what_another_client_finishes_while_the_engine_starts_is_counted_as_its(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    run(targets["appending"], tmp_path / "whole")
    shard, output = "shard-00001.parquet", tmp_path / "data"

    def start(name: str, settings: GenerationSettings) -> FakeEngine:
        shutil.copy(tmp_path / "whole" / shard, output / shard)
        return FakeEngine(AutoTokenizer.from_pretrained(name), settings)

    summary = generate_data(
        str(targets["appending"]), PROMPTS, output, start, SETTINGS, Console(file=io.StringIO())
    )
    assert (summary.kept_shards, summary.others_shards, summary.conversations) == (0, 1, 8)
    assert content(output) == content(tmp_path / "whole")


def test_rows_that_are_left_out_are_so_for_every_client_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "LOOK_SECONDS", 0.01)
    target = with_extra_token(make_folder(tmp_path / "target", APPENDING))
    bad = [Conversation((f"value <|extra|> {i}",), source=f"bad line {i}") for i in range(4)]
    prompts = [bad[0], *PROMPTS[:3], bad[1], bad[2], *PROMPTS[3:], bad[3]]
    run(target, tmp_path / "good")
    output = tmp_path / "data"
    run(target, output, prompts, answers_until_killed=5)
    assert len(finished_shards(output)) < 4
    in_threads(
        lambda: run(target, output, prompts, order=1, pause=0.01) and None,
        lambda: run(target, output, PROMPTS, order=2, pause=0.01) and None,
    )
    assert content(output) == content(tmp_path / "good")
    assert DatasetInfo.load(output) == DatasetInfo.load(tmp_path / "good")


def test_a_client_with_nothing_to_do_waits_for_the_others_and_takes_over(
    targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "LOOK_SECONDS", 0.01)
    run(targets["appending"], tmp_path / "one")
    output, console = tmp_path / "several", Console(file=io.StringIO(), width=200)
    run(targets["appending"], output, answers_until_killed=3)
    for shard in range(4):
        (output / f"shard-{shard:05d}.parquet").unlink(missing_ok=True)
    other = ShardLeases(output)
    for _ in range(4):
        other.take(range(4))

    def give_back() -> None:
        ends = time.monotonic() + 20
        while "other clients'" not in console.file.getvalue() and time.monotonic() < ends:
            time.sleep(0.01)
        for shard in (2, 0, 3, 1):
            other.release(shard)

    in_threads(give_back, lambda: run(targets["appending"], output, console=console) and None)
    assert content(output) == content(tmp_path / "one")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": SamplingSettings(max_tokens=40, temperature=0.5)}, "temperature: 1.0, not 0"),
        ({"sampling": SamplingSettings(max_tokens=41)}, "max_tokens: 40, not 41"),
        ({"sampling": SamplingSettings(max_tokens=40, seed=1)}, "seed: 0, not 1"),
        ({"shard_size": 4}, "shard_size: 3, not 4"),
        ({"system_prompt": "Be brief."}, "system_prompt: None, not 'Be brief.'"),
    ],
)
def test_data_of_other_settings_is_not_continued(
    change: dict[str, Any], message: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    run(targets["appending"], tmp_path, answers_until_killed=12)
    before = content(tmp_path)
    assert before
    with pytest.raises(ConfigError, match=rf"these: {message}.*Give the former settings or anoth"):
        run(targets["appending"], tmp_path, settings=replace(SETTINGS, **change))
    assert content(tmp_path) == before
    run(targets["appending"], tmp_path, settings=replace(SETTINGS, in_flight=2))
    assert len(content(tmp_path)) == 4


def test_data_of_other_prompts_or_another_target_is_not_continued(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    run(targets["appending"], tmp_path / "data", answers_until_killed=12)
    changed = [*PROMPTS[:-1], Conversation(("something else",))]
    with pytest.raises(ConfigError, match="prompts_fingerprint: '"):
        run(targets["appending"], tmp_path / "data", changed)
    with pytest.raises(ConfigError, match="these: template_fingerprint: '"):
        run(targets["rewriting"], tmp_path / "data")
    other = make_target(tmp_path / "other", seed=1)
    AutoTokenizer.from_pretrained(targets["appending"]).save_pretrained(other)
    with pytest.raises(ConfigError, match=r"these: target_fingerprint: '\w+', not '\w+'. Give"):
        run(other, tmp_path / "data")


def test_shards_of_unknown_origin_are_not_continued(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    run(targets["appending"], tmp_path)
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"shards without a dataset\.json"):
        run(targets["appending"], tmp_path)


def test_a_full_disk_ends_the_run_and_the_next_one_continues(
    targets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(targets["appending"], tmp_path / "whole")
    fsync, calls = os.fsync, []

    def filling(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 6:  # dataset.json and two shards, each a file and its folder
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", filling)
        with pytest.raises(ConfigError, match="the disk is full"):
            run(targets["appending"], tmp_path / "data")
    assert len(finished_shards(tmp_path / "data")) == 2
    run(targets["appending"], tmp_path / "data")
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def test_an_interrupt_closes_the_engine_and_says_what_is_finished(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run(
            targets["appending"],
            tmp_path,
            console=console,
            answers_until_killed=12,
            death=KeyboardInterrupt,
        )
    assert re.search(r"[12] of 4 shards are\s+finished", console.file.getvalue())
