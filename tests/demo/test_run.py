"""The demo's bookkeeping: prompts, cached artifacts, errors; no vLLM."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from transformers import LlamaConfig
from typer.testing import CliRunner

from vllm_redrafter import Drafter, DrafterConfig, save_drafter
from vllm_redrafter.cli import app
from vllm_redrafter.data.rows import ListRows, TextRow
from vllm_redrafter.demo.decoding import DecodingJob, LevelResult, engine_environment
from vllm_redrafter.demo.report import (
    identical,
    print_answer,
    print_comparison,
)
from vllm_redrafter.demo.run import _check_sizes, _made_once, prompts_of
from vllm_redrafter.errors import ConfigError


def test_prompts_are_what_the_target_did_not_write() -> None:
    rows = [([0, 10], [5, 5]), ([0, 11, 12], [6]), ([7], [7])]
    text = ListRows(TextRow.from_answer(prompt, answer) for prompt, answer in rows)
    assert prompts_of(text, 2) == [[0, 10], [0, 11, 12]]


def test_artifacts_are_made_once_per_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "thing"
    made = []

    def make(settings: dict[str, int], fails: bool = False) -> None:
        with _made_once(path, settings, Console(file=io.StringIO())) as needed:
            if needed:
                assert not path.exists()
                path.mkdir()
                made.append(settings)
                if fails:
                    raise KeyboardInterrupt

    make({"size": 1})
    make({"size": 1})
    assert made == [{"size": 1}]
    with pytest.raises(KeyboardInterrupt):
        make({"size": 2}, fails=True)
    make({"size": 2})
    make({"size": 2})
    assert made == [{"size": 1}, {"size": 2}, {"size": 2}]


def test_an_unusable_target_folder_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["demo", "--cache-dir", str(tmp_path), "--target", str(tmp_path / "none")]
    )
    assert result.exit_code == 1
    assert "no config.json there" in result.stderr and "leave --target out" in result.stderr


def test_a_drafter_of_other_sizes_is_refused(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=20, hidden_size=8, num_attention_heads=2).save_pretrained(
        tmp_path / "target"
    )
    save_drafter(Drafter(DrafterConfig(20, 4, 4)), tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"has hidden_size 4, the target .* has 8"):
        _check_sizes(tmp_path / "target", tmp_path / "drafter")


def test_a_preload_of_the_users_own_is_kept() -> None:
    environment = engine_environment({"LD_PRELOAD": "/mine.so", "VLLM_LOGGING_LEVEL": "INFO"})
    assert environment["LD_PRELOAD"].split(":")[0] == "/mine.so"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"


def test_no_second_openmp_runtime_is_preloaded() -> None:
    environment = engine_environment({"LD_PRELOAD": "/torch/libgomp.so.1"})
    libraries = environment["LD_PRELOAD"].split(":")
    assert [path for path in libraries if "omp" in path] == ["/torch/libgomp.so.1"]


def levels() -> tuple[LevelResult, LevelResult]:
    plain = LevelResult(1, 2.0, [[[5], [6], [7], [8]]], {})
    drafted = LevelResult(1, 1.0, [[[5], [6, 7, 8]]], {"sampled_tokens": 3, "verifications": 1})
    return plain, drafted


def test_report_says_what_was_measured() -> None:
    plain, drafted = levels()
    assert plain.tokens_per_second == 2.0 and plain.tokens_per_target_step == 1.0
    assert drafted.tokens_per_target_step == 3.0
    assert identical(plain, drafted) == "yes"
    other = LevelResult(1, 1.0, [[[5], [6, 7, 9]]], {})
    assert identical(plain, other) == "no: 0 of 1"
    console = Console(file=io.StringIO(), width=120)
    print_comparison(console, [plain], [drafted])
    assert "2.00×" in console.file.getvalue() and "3.00" in console.file.getvalue()


def test_accepted_tokens_are_told_from_the_targets_own() -> None:
    class Letters:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(token) for token in tokens)

    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    print_answer(console, Letters(), [*b"def "], [[*b"f"], [*b"(ab"], [*b")"]])
    output = console.file.getvalue()
    assert "\x1b[1;32m(a\x1b[0m" in output
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert "2 of its 5 tokens were drafted, in 3 target steps" in plain


def test_a_level_has_prompts_enough_to_keep_its_batch_full() -> None:
    job = DecodingJob("t", None, [[1]] * 100, 4, [1, 4, 8], 16, repeats=3)
    assert [len(job.prompts_at(level)) for level in job.levels] == [8, 16, 32]
    assert job.decodings == (8 + 16 + 32) * 4
