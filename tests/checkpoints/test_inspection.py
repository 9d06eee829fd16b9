# SPDX-License-Identifier: Apache-2.0
"""Inspection says what a checkpoint is and whom it fits, from its headers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Gemma3Config, GptOssConfig, LlamaConfig
from typer.testing import CliRunner, Result

from redrafter_testing.models.published_speculators import H, V, make_lstm
from redrafter_testing.models.quantised import FORMATS, quantise
from redrafter_testing.models.tiny_models import make_drafter, make_small_target
from vllm_redrafter.checkpoints.acceptance import AcceptanceRecord, PerSampling, acceptance_entry
from vllm_redrafter.checkpoints.draft_cost import parameters_read, step_bytes
from vllm_redrafter.checkpoints.fit import misfits, misfits_of, require_fit
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.cli.main import app
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads import head
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.heads.speculators import LstmSpeculatorConfig, MlpSpeculatorConfig
from vllm_redrafter.utils.errors import ConfigError

CONFIG = RecurrentConfig(11, 4, exit_dim=6, num_draft_layers=1)
REDUCED = RecurrentConfig(40, 4, exit_dim=6, draft_vocab_size=3)
SHAPE = {"num_speculative_tokens": 3, "beam_width": 2, "beam_length": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    drafter = RecurrentHead(CONFIG).bfloat16()
    record = AcceptanceRecord(1.0, (0.0, 0.0), ((0.5, 0.2), (0.4, 0.1)))
    entries = {"training": {"data": {"rows": 12}}} | acceptance_entry(PerSampling(record))
    save_drafter(drafter, tmp_path / "drafter", "org/[bold]target", SHAPE, **entries)
    return tmp_path / "drafter"


def save_target(folder: Path, **sizes: int) -> str:
    values = {"vocab_size": 11, "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 8}
    LlamaConfig(**values | sizes).save_pretrained(folder)
    return str(folder)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})


# --- Targets ---


def test_what_is_no_target_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "invalid").mkdir()
    values = {"model_type": "gemma3_text", "hidden_size": 4, "num_attention_heads": 3}
    (tmp_path / "invalid/config.json").write_text(json.dumps(values))
    for path in (folder, tmp_path / "empty", tmp_path / "invalid"):
        with pytest.raises(ConfigError, match="transformers cannot read its tokenizer or conf"):
            Target.open(path)


def test_differing_sizes_are_named_with_both_values_and_are_status_1(
    folder: Path, tmp_path: Path
) -> None:
    hidden = "the drafter's hidden size is 4, the target's 8"
    vocabulary = "the drafter's vocabulary size is 11, the target's 12"
    assert [*misfits(CONFIG, 4, 11)] == []
    assert [*misfits(CONFIG, 8, 12)] == [hidden, vocabulary]
    require_fit("mine", "theirs", [])
    with pytest.raises(ConfigError, match=f"mine does not fit the target 'theirs': {hidden}; the"):
        require_fit("mine", "theirs", [hidden, vocabulary])
    target = save_target(tmp_path / "target", vocab_size=12)
    result = command(folder, "--target", target)
    assert result.exit_code == 1
    assert f"error: the drafter does not fit {target!r}: {vocabulary}" in result.stderr
    text = {"vocab_size": 11, "hidden_size": 4, "num_attention_heads": 1}
    assert misfits_of(CONFIG, Gemma3Config(text_config=text)) == []


# --- The command ---


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.output.splitlines()]


def test_the_command_says_what_is_served_how_good_it_is_and_in_full_if_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, all = lines(command(folder)), lines(command(folder, "--verbose"))
    assert first == [
        f"drafter {folder}: recurrent_drafting_drafter, from RecurrentDrafter",
        "target org/[bold]target: hidden size 4, vocabulary size 11",
        "served with K 3, 2 beams of 2 tokens",
        "gives tokens per target step, without matches, as evaluate measured: 2.1 greedy",
        "size 198 parameters in bfloat16, 396 bytes; a draft reads 792 bytes",
        "ranks all 11 tokens",
        "licence not stated in its README.md",
        "training --verbose shows it",
    ]
    assert all[: len(first)] == first and {'"exit_dim": 6,', '"rows": 12'} <= {*all}
    monkeypatch.setattr(head, "LARGE_DRAFT_VOCABULARY", 11)
    assert "--draft-vocab-size 32768" in command(folder).output


def test_the_command_says_what_a_checkpoint_does_not_record(tmp_path: Path) -> None:
    drafter = RecurrentHead(REDUCED)
    drafter.keep_tokens(torch.tensor([2, 3, 39]))
    save_drafter(drafter, tmp_path)
    assert {
        "target not recorded: hidden size 4, vocabulary size 40",
        "served with K as --spec-tokens says, 4 beams of 5 tokens",
        "gives nothing is recorded: vllm-redrafter evaluate --record measures it",
        "ranks 3 of the target's 40 tokens (7.5%)",
        "training nothing is recorded",
    } <= {*lines(command(tmp_path))}


def test_the_layers_that_it_reads_are_shown_and_looked_for_in_the_target(tmp_path: Path) -> None:
    fused = RecurrentConfig(11, 4, exit_dim=6, target_layers=(2, 5))
    save_drafter(RecurrentHead(fused), tmp_path / "fused")
    said = lines(command(tmp_path / "fused", "--target", save_target(tmp_path / "deep")))
    assert "reads layers 2, 5 of the target: vLLM must support EAGLE-3 for its class" in said
    save_target(tmp_path / "shallow", num_hidden_layers=5)
    [reason] = misfits_of(fused, Target.open(tmp_path / "shallow").config)
    assert "layers 2, 5 are asked for, and the target has 5" in reason
    shallow = AutoConfig.from_pretrained(tmp_path / "shallow")
    assert misfits_of(fused, shallow, with_layers=False) == []


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantised_target_is_read(form: str, tmp_path: Path) -> None:
    target = quantise(make_small_target(tmp_path / "target"), FORMATS[form])
    drafter = make_drafter(tmp_path / "drafter", hidden_size=64)
    assert lines(command(drafter, "--target", target))[-1] == f"the drafter fits {target}"


# --- What drafts cost ---


def test_what_a_draft_and_a_step_read_of_a_published_pair() -> None:
    """Llama-3.1-8B with Arctic's LSTM and IBM's MLP; gpt-oss-120b in its own 4 bits."""
    llama = LlamaConfig(
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"},
    )
    assert step_bytes(llama) == 2 * 7_504_924_672
    packed = GptOssConfig(quantization_config={"quant_method": "mxfp4"}, dtype="bfloat16")
    assert 4.9e9 < (step_bytes(packed) or 0) < 5.1e9
    lstm = LstmSpeculatorConfig(128256, 4096, width=4096, num_levels=3)
    level = 128256 * 4096 + 4 * 4096**2 + 4 * 4096
    assert [parameters_read(lstm, levels) for levels in (3, 5)] == [3 * level, 5 * level]
    mlp = MlpSpeculatorConfig(128256, 4096, width=3072, num_levels=4, tied=False)
    layers = 4 * (128256 * 3072 + 2 * 3072) + 3072 * 4096 + 3 * 3072**2
    assert parameters_read(mlp, 4) == layers


def test_dear_drafts_are_warned_of_and_licences_read_off_the_card(tmp_path: Path) -> None:
    drafter = make_lstm(tmp_path / "it", safe=True, all_names=False)
    (drafter / "README.md").write_text("---\nlicense: llama3\n---\n# A card")
    target = save_target(
        tmp_path / "target", vocab_size=V, hidden_size=H, intermediate_size=H, num_hidden_layers=1
    )
    output = " ".join(command(drafter, "--target", target).output.split())
    assert "redrafter_lstm, from ArcticLSTMSpeculatorPreTrainedModel, sum_lstm" in output
    assert "licence llama3" in output and "a draft reads 139.9 kB" in output
    assert "drafts cost more than they bring where a step gives fewer than 3.6 tokens" in output
