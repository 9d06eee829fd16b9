# SPDX-License-Identifier: Apache-2.0
"""The soak's own judgement, on servers without a model: what is wrong with one is found."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import soak
from soak_parts import load, models, report, server

from redrafter_testing.benchmarks import fake_server

REQUESTS = "100"


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flaws: str) -> tuple[int, Any]:
    """Exit status and record of a soak; servers that start are gone after it."""
    script = (sys.executable, "-P", fake_server.__file__)
    monkeypatch.setattr(server, "COMMAND", (*script, *flaws, "serve"))
    monkeypatch.setattr(server, "SECONDS_TO_START", 60.0)
    monkeypatch.setattr(load, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(report, "MOST_GROWTH", 40.0)
    output = tmp_path / "soak.json"
    code = soak.main(["--requests", REQUESTS, "--logs", str(tmp_path), "--output", str(output)])
    return code, json.loads(output.read_text())


def test_a_server_that_answers_as_plain_vllm_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path, monkeypatch)
    assert (code, found["failures"]) == (0, [])
    assert found["sent"] == int(REQUESTS)
    assert found["answered"] + found["aborted"] == found["sent"]
    assert 0 < found["aborted"] < 30
    assert found["preemptions"] > 0
    assert found["free_blocks"] == [63, 63]
    assert min(*found["memory"], *found["plain_memory"]) > 1
    assert sum(found["kinds"].values()) == int(REQUESTS)
    assert "differences    0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flaw", "failure"),
    [
        ("--other-answers", "differ from plain vLLM's"),
        ("--keeps-blocks", "16 KV blocks were not freed"),
        ("--grows", "memory grew by"),
        ("--refuses", "were not answered"),
    ],
)
def test_a_flaw_is_found(
    flaw: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = run(tmp_path, monkeypatch, flaw)
    assert code == 1
    assert len(found["failures"]) == 1
    assert failure in found["failures"][0]


def test_a_server_that_does_not_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "COMMAND", (sys.executable, "-c", "raise SystemExit('no room')"))
    assert soak.main(["--logs", str(tmp_path)]) == 2
    assert "no room" in capsys.readouterr().err


def test_the_drafter_that_is_made_up_is_often_right_and_often_wrong(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_redrafter import load_drafter

    target_folder, drafter_folder = models.write_models(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    drafter = load_drafter(str(drafter_folder))
    prompts = torch.randint(2, 512, (8, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        answers = target.generate(prompts, max_new_tokens=32, do_sample=False, pad_token_id=0)
        expected = target(answers).logits.argmax(-1)[:, 12:]
        embedded = target.get_input_embeddings()(answers)
        condition = drafter.condition(torch.zeros_like(embedded))
        state = drafter.start(condition, embedded)
        drafted = drafter.logits(condition, state, 0).argmax(-1)[:, 12:]
    assert 0.4 < float((drafted == expected).float().mean()) < 0.9
