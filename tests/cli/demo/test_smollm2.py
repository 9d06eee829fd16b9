# SPDX-License-Identifier: Apache-2.0
"""The demo with SmolLM2, all but the engines: a tiny target, and answers that were thought up."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from vllm_redrafter import save_drafter
from vllm_redrafter.cli.demo import smollm2
from vllm_redrafter.cli.demo.decoding import DecodingJob
from vllm_redrafter.cli.demo.engine_worker import Decoded, Round
from vllm_redrafter.cli.demo.prompts import PROMPTS
from vllm_redrafter.cli.main import app
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.utils.errors import ConfigError

WORDS = ["<unk>", "so", "it", "is", "[user]", "[answer]"]
TEMPLATE = "[user] {{ messages[0]['content'] }} [answer]"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    config = LlamaConfig(vocab_size=len(WORDS), hidden_size=8, num_attention_heads=2)
    config.save_pretrained(folder)
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    shape = {"num_speculative_tokens": 5, "beam_width": 2, "beam_length": 3}
    save_drafter(
        RecurrentHead(RecurrentConfig(len(WORDS), 8, 8)), tmp_path / "drafter", shape=shape
    )
    return tmp_path / "drafter"


class Engine:
    """Answers "so it is" to everything; with a drafter, the first two words in one step."""

    def __init__(self, job: DecodingJob) -> None:
        self.job = job
        self.rounds: list[Round] = []

    def decode(self, asked: Round, on_answer: Callable[[], None]) -> Decoded:
        self.rounds.append(asked)
        is_plain = self.job.speculative_config is None
        answer = [[1], [2], [3]] if is_plain else [[1], [2, 3]]
        stats = {} if is_plain else {"sampled_tokens": 2.0, "verifications": 1.0}
        return Decoded(2.0 if is_plain else 1.0, [answer for _ in asked.prompts], stats)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    made: list[Engine] = []

    @contextmanager
    def engines(jobs: Sequence[DecodingJob], logs: Sequence[Path]) -> Iterator[list[Engine]]:
        assert len(set(logs)) == len(jobs) and all(log.parent.is_dir() for log in logs)
        made.extend(Engine(job) for job in jobs)
        yield made

    monkeypatch.setattr(smollm2, "engines", engines)
    return made


def test_the_demo_compares_and_shows_all_answers(
    target: Path, drafter: Path, started: list[Engine], tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=1000)
    smollm2.run_demo(tmp_path / "cache", target, drafter, console)

    plain, drafted = started
    assert plain.job.speculative_config is None
    assert drafted.job.speculative_config == {
        "model": str(drafter),
        "num_speculative_tokens": 5,
        "beam_width": 2,
        "beam_length": 3,
        "tree": "explored",
        "adaptive": True,
        "context_matches": 2,
        "candidates": 0,
    }
    for prompt in plain.job.prompts:
        assert prompt[0] == WORDS.index("[user]") and prompt[-1] == WORDS.index("[answer]")
    assert plain.rounds == drafted.rounds[:-1]
    shown = drafted.rounds[-1]
    assert shown.in_flight == 1 and shown.prompts == plain.job.prompts
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert output.count("2.00×") == len(smollm2.LEVELS) and "yes" in output
    assert output.count("1 of its 3 tokens were drafted, in 2 target steps") == len(PROMPTS)
    assert all(question in output for question in PROMPTS.values())
    assert str(tmp_path / "cache") in output


def test_a_drafter_that_records_no_shape_gets_one(
    target: Path, started: list[Engine], tmp_path: Path
) -> None:
    save_drafter(RecurrentHead(RecurrentConfig(len(WORDS), 8, 8)), tmp_path / "drafter")
    console = Console(file=io.StringIO())
    smollm2.run_demo(tmp_path / "cache", target, tmp_path / "drafter", console)
    config = started[1].job.speculative_config
    assert config is not None and config["num_speculative_tokens"] == 12


def test_the_prompts_fill_every_level(
    target: Path, drafter: Path, started: list[Engine], tmp_path: Path
) -> None:
    smollm2.run_demo(tmp_path / "cache", target, drafter, Console(file=io.StringIO()))
    job = started[0].job
    assert [len(job.prompts_at(level)) for level in job.levels] == [4, 12, 24]
    assert [level for level in job.levels if len(job.prompts_at(level)) < level] == []


def test_a_target_without_embeddings_of_its_templates_tokens_is_refused(target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.chat_template = "<|extra|>" + TEMPLATE
    with pytest.raises(ConfigError, match=r"token '<.extra.>' \(id 6\) has no row in the target's"):
        smollm2.prompts_of(tokenizer, target, ["so it is"])


def test_the_command_runs_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(smollm2, "run_demo", lambda *given: ran.append(given))
    result = CliRunner().invoke(app, ["demo", "--cache-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert ran == [(tmp_path, None, None)]
