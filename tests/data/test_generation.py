"""Generation with a target that is made up: what is asked, what is kept, and what a kill costs."""

from __future__ import annotations

import errno
import io
import os
import re
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
from typer.testing import CliRunner

from redrafter_testing.engines.fake_engine import APPENDING, REWRITING, FakeEngine, Killed
from redrafter_testing.in_background import in_background
from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from vllm_redrafter.cli import app
from vllm_redrafter.data import generation
from vllm_redrafter.data.dataset import finished_shards, read_dataset
from vllm_redrafter.data.generation import GenerationSummary, generate_data
from vllm_redrafter.data.leases import ShardLeases
from vllm_redrafter.data.prompts import Conversation
from vllm_redrafter.data.settings import GenerationSettings, SamplingSettings
from vllm_redrafter.data.turns import answer_seed
from vllm_redrafter.errors import ConfigError

SETTINGS = GenerationSettings(
    sampling=SamplingSettings(max_tokens=40), shard_size=3, in_flight=4, top_logprobs=2
)
PROMPTS = [
    Conversation(tuple(f"value {i} list {turn}" for turn in range(1 + i % 3)), source=f"line {i}")
    for i in range(11)
]
SINGLE = [Conversation(c.turns[:1], source=c.source) for c in PROMPTS]

Generate = Callable[..., tuple[GenerationSummary, FakeEngine]]


def make_folder(folder: Path, template: str | None) -> Path:
    make_target(folder)
    add_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    templates = {"appending": APPENDING, "rewriting": REWRITING, "plain": None}
    return {
        name: make_folder(tmp_path_factory.mktemp(name), template)
        for name, template in templates.items()
    }


def run(
    target: Path,
    output: Path,
    prompts: list[Conversation] = PROMPTS,
    settings: GenerationSettings = SETTINGS,
    console: Console | None = None,
    **engine: Any,
) -> tuple[GenerationSummary | None, FakeEngine]:
    """The summary (None where it died) and the engine."""
    engines = []

    def start(name: str, settings: GenerationSettings) -> FakeEngine:
        engines.append(FakeEngine(AutoTokenizer.from_pretrained(name), settings, **engine))
        return engines[0]

    console = console or Console(file=io.StringIO())
    try:
        summary = generate_data(str(target), prompts, output, start, settings, console)
    except Killed:
        summary = None
    if not engines:
        return summary, FakeEngine(None, settings)
    assert engines[0].closed
    return summary, engines[0]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_every_conversation_is_there_once_in_the_order_of_the_prompts(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    summary, engine = run(targets["appending"], tmp_path)
    info, data = read_dataset(tmp_path)
    assert list(data["conversation"]) == list(range(11))
    assert finished_shards(tmp_path) == [0, 1, 2, 3]
    assert (info.num_conversations, info.vocab_size, info.top_logprobs) == (11, 512, 2)
    assert engine.most_in_flight == 4, "continuous over the borders of shards, but no more"
    assert summary is not None
    written = [len(answer.tokens) for _, answer in engine.asked]
    assert (summary.conversations, summary.rows) == (11, 11)
    assert summary.answers == len(written) == sum(len(c.turns) for c in PROMPTS)
    assert summary.tokens == sum(written) == sum(map(sum, data["assistant_mask"]))
    assert summary.mean_answer_length == sum(written) / len(written)
    assert (summary.truncated, summary.skipped, summary.cut_answers) == (0, 0, 0)


def test_an_appending_template_gives_one_row_with_all_turns(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    _, engine = run(targets["appending"], tmp_path, [PROMPTS[2]])
    tokenizer = engine.tokenizer
    tokens: list[int] = []
    mask: list[bool] = []
    for said, (_, answer) in zip(PROMPTS[2].turns, engine.asked, strict=True):
        prompt = tokenizer(f"<s>user\n{said}<s>assistant\n")["input_ids"]
        tokens += prompt + answer.tokens
        mask += [False] * len(prompt) + [True] * len(answer.tokens)
        assert answer.tokens[-1] == tokenizer.eos_token_id and answer.ended
    _, data = read_dataset(tmp_path)
    assert data["input_ids"][:] == [tokens]
    assert data["assistant_mask"][:] == [mask]


def test_a_rewriting_template_gives_a_row_per_turn_with_its_last_answer_marked(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    conversation = Conversation(("list 1", "name 2", "value 3"), system="value 0")
    _, engine = run(targets["rewriting"], tmp_path, [conversation])
    _, data = read_dataset(tmp_path)
    assert len(data) == 3
    history = "<s>system\n0"
    for row, said, (request, answer) in zip(data, "123", engine.asked, strict=True):
        prompt = engine.tokenizer(f"{history}<s>user\n{said}<s>assistant\n")["input_ids"]
        assert row["input_ids"] == prompt + answer.tokens == request.prompt + answer.tokens
        assert row["assistant_mask"] == [False] * len(prompt) + [True] * len(answer.tokens)
        last_word = engine.tokenizer.decode(answer.tokens[:-1]).split(" ")[-1]
        history += f"<s>user\n{said}<s>assistant\n{last_word}</s>"


@pytest.mark.parametrize("name", ["appending", "rewriting"])
def test_marked_tokens_are_what_the_target_wrote_in_just_that_context(
    name: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    _, engine = run(targets[name], tmp_path)
    answers = {(r.conversation, *r.prompt): answer for r, answer in engine.asked}
    found = []
    for row in read_dataset(tmp_path)[1]:
        tokens, mask = row["input_ids"], row["assistant_mask"]
        assert not mask[0]
        starts = [i for i, marked in enumerate(mask) if marked and not mask[i - 1]]
        for start in starts:
            end = [*mask, False].index(False, start)
            found.append((row["conversation"], *tokens[:start]))
            answer = answers[found[-1]]
            assert tokens[start:end] == answer.tokens
            assert row["top_tokens"][start:end] == answer.top_tokens
            assert row["top_log_probs"][start:end] == answer.top_log_probs
        unmarked = [i for i, marked in enumerate(mask) if not marked]
        assert all(row["top_tokens"][i] == row["top_log_probs"][i] == [] for i in unmarked)
    assert sorted(found) == sorted(answers)


def test_without_a_template_prompts_are_plain_text(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    _, engine = run(targets["plain"], tmp_path, SINGLE)
    expected = {tuple(engine.tokenizer(c.turns[0])["input_ids"]) for c in SINGLE}
    assert {tuple(request.prompt) for request, _ in engine.asked} == expected


def test_what_only_a_template_could_express_is_refused(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"line 1: a conversation of 2 user turns, but .* templat"
    ):
        run(targets["plain"], tmp_path, PROMPTS)
    with pytest.raises(ConfigError, match="1 user turns and a system message, but"):
        run(targets["plain"], tmp_path, [replace(SINGLE[0], system="Be brief.")])
    with pytest.raises(ConfigError, match="--system-prompt: the target's tokenizer has no chat"):
        run(targets["plain"], tmp_path, SINGLE, replace(SETTINGS, system_prompt="Be brief."))
    assert not list(tmp_path.iterdir())


def test_a_conversation_that_the_template_refuses_is_named_before_anything_starts(
    tmp_path: Path,
) -> None:
    refusal = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    target = make_folder(tmp_path / "target", refusal + APPENDING)
    with pytest.raises(ConfigError, match="line 1: the target's chat template refuses it: one tu"):
        run(target, tmp_path / "data", PROMPTS)
    assert not (tmp_path / "data").exists()


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "target", "{{ '' }}")
    with pytest.raises(ConfigError, match="line 0: the prompt 'value 0 list 0' has no tokens"):
        run(target, tmp_path / "data", SINGLE)


def test_the_system_prompt_is_for_conversations_without_their_own(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    prompts = [SINGLE[0], replace(SINGLE[1], system="name 1")]
    settings = replace(SETTINGS, system_prompt="value 9")
    _, engine = run(targets["appending"], tmp_path, prompts, settings)
    texts = {engine.tokenizer.decode(request.prompt) for request, _ in engine.asked}
    assert {text.split("<s>")[1] for text in texts} == {"system\nvalue 9", "system\nname 1"}


# Stopping and going on


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
        ({"top_logprobs": 0}, "top_logprobs: 2, not 0"),
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


# Length


def test_what_is_longer_than_the_model_allows_is_skipped_or_truncated_and_counted(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    words = " ".join(["value"] * 60)
    prompts = [
        Conversation((words, "value 1"), source="too long"),
        Conversation(("value 1", words), source="its second turn is"),
        Conversation(("value 2",), source="fits"),
    ]
    summary, engine = run(targets["appending"], tmp_path, prompts, max_model_len=48)
    assert summary is not None
    assert (summary.skipped, summary.truncated, summary.conversations) == (1, 1, 3)
    info, data = read_dataset(tmp_path)
    assert list(data["conversation"]) == [1, 2]
    assert sorted(request.conversation for request, _ in engine.asked) == [1, 2]
    assert "1 conversations were truncated and 1 skipped" in str(summary)
    assert info.num_conversations == 3


def test_answers_that_reach_a_limit_are_counted_and_have_no_eos(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, sampling=SamplingSettings(max_tokens=3))
    summary, engine = run(targets["appending"], tmp_path / "max", PROMPTS, settings)
    cut = [answer for _, answer in engine.asked if not answer.ended]
    assert summary is not None and summary.cut_answers == len(cut) > 0
    assert all(len(a.tokens) == 3 and engine.tokenizer.eos_token_id not in a.tokens for a in cut)
    assert summary.truncated == 0

    room = len(engine.tokenizer("<s>user\nvalue 2 list 0<s>assistant\n")["input_ids"]) + 1
    summary, engine = run(
        targets["appending"], tmp_path / "room", [PROMPTS[2]], SETTINGS, max_model_len=room
    )
    assert summary is not None and (summary.truncated, summary.cut_answers) == (1, 0)
    assert [len(answer.tokens) for _, answer in engine.asked] == [1], "no turn follows"


# Settings and the command line


def test_each_answer_has_a_seed_of_its_own() -> None:
    seeds = {answer_seed(s, c, t) for s in range(3) for c in (0, 1, 11, 12) for t in (0, 1, 11, 12)}
    assert len(seeds) == 48
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert answer_seed(0, 1, 2) == answer_seed(0, 1, 2)


@pytest.mark.parametrize(
    "setting", [{"shard_size": 0}, {"in_flight": 0}, {"top_logprobs": -1}, {"spec_tokens": 0}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, int]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=rf"generation: {name} must be at least \d, got {value}"):
        GenerationSettings(**setting)


def test_more_log_probabilities_than_tokens_are_refused(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--top-logprobs 513: the target's vocabulary has 512"):
        run(targets["appending"], tmp_path, settings=replace(SETTINGS, top_logprobs=513))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["generate-data", *map(str, arguments)])


def test_the_command_reports_errors_in_one_line(targets: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n{"prompt": 1}\n')
    output = ("--output", tmp_path / "data")
    bad = invoke(targets["plain"], "--prompts", prompts, *output)
    assert bad.exit_code == 1
    assert bad.stderr.startswith(f"error: {prompts}, line 2: 'prompt' must be text, found 1")
    spec = invoke(targets["plain"], "--prompts", prompts, *output, "--spec-tokens", 4)
    assert spec.exit_code == 1 and "--spec-tokens is for --drafter" in spec.stderr
    prompts.write_text('{"prompt": "x"}\n')
    none = invoke(tmp_path / "nothing", "--prompts", prompts, *output)
    assert none.exit_code == 1 and "cannot read its tokenizer" in none.stderr
    assert not (tmp_path / "data").exists()
