# SPDX-License-Identifier: Apache-2.0
"""The demo with SmolLM2: a tiny target, made-up answers, and another program for vLLM."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from redrafter_testing.engines.fake_chat import Typed
from redrafter_testing.models.families.family import word_tokenizer
from redrafter_testing.own_commands import refusal_of
from vllm_redrafter import save_drafter
from vllm_redrafter.cli.demo import smollm2
from vllm_redrafter.cli.demo.engine import Decoded, Job, Round, decode_in_vllm
from vllm_redrafter.cli.demo.smollm2 import PROMPTS
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.utils.errors import ConfigError

WORDS = ["<unk>", "<end>", "so", "it", "is", "[user]", "[answer]"]
TEMPLATE = "[user] {{ messages[0]['content'] }} [answer]"
NEAR_TIE = r"4 of 4: 3 equal, 1 parting at a near-tie \(at most 0.125 apart\)"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    config = LlamaConfig(vocab_size=len(WORDS), hidden_size=8, num_attention_heads=2)
    config.save_pretrained(folder)
    word_tokenizer(WORDS, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


class Engine:
    """It answers "so it is", with a drafter in two steps; what it is given is kept."""

    plain, drafted = [[2], [3], [4]], [[2], [3, 4]]
    candidates: Sequence[tuple[int, float]] = ()

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def decode(self, _: Path, job: Job) -> Iterator[Decoded]:
        self.jobs.append(job)
        last = self.drafted if job.speculative_config else self.plain
        for each in job.rounds:
            if each.candidates:
                yield Decoded(0.0, [], [[*self.candidates] for _ in each.prompts])
            else:
                steps = Engine.drafted if job.speculative_config else Engine.plain
                answers = [steps] * (len(each.prompts) - 1) + [last]
                yield Decoded(1.0 * len(steps), answers)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(smollm2, "decode_in_vllm", engine.decode)
    return engine


def show(console: Typed, target: Path, shape: Mapping[str, int] = MappingProxyType({})) -> str:
    """What the demo prints with a drafter that records a shape."""
    drafter = target.with_name("drafter")
    save_drafter(RecurrentHead(RecurrentConfig(len(WORDS), 8, 8)), drafter, shape={**shape})
    smollm2.run_demo(target.with_name("cache"), str(target), str(drafter), console)
    return console.shown()


def test_the_demo_compares_and_shows_all_answers(engine: Engine, target: Path) -> None:
    shape = {"num_speculative_tokens": 5, "beam_width": 2, "beam_length": 3}
    output = show(Typed(()), target, shape)
    plain, drafted = engine.jobs
    assert plain.speculative_config is None
    drafter = {"model": str(target.with_name("drafter")), "earlier_answers": 0}
    assert drafted.speculative_config == drafter | shape
    assert plain.rounds == drafted.rounds
    assert [each.in_flight for each in plain.rounds] == [1, 1, 4, 4, 8, 8]
    assert [len(each.prompts) for each in plain.rounds[::2]] == [len(PROMPTS), 12, 24]
    assert output.count("1.50×") == output.count("2.00") == 3
    for total in (len(PROMPTS), 12, 24):
        assert f"{total} of {total}: {total} equal" in output
    said = "1 of its 3 tokens were drafted, in 2 target steps; equal to plain vLLM"
    assert output.count(said) == output.count("so\x1b[4;32m it\x1b[0m is") == len(PROMPTS)
    assert all(question in output for question in PROMPTS)
    assert str(target.with_name("cache")) in output


@pytest.mark.parametrize(
    ("dtype", "drafted", "candidates", "verdict"),
    [
        # Behind the first difference the texts are different, and nothing can be compared.
        (torch.bfloat16, [[2], [5, 5]], [(5, -1.0), (3, -1.125)], NEAR_TIE),
        (torch.bfloat16, [[2], [5, 5]], [(5, -1.0), (3, -1.5)], "FAULT: 1 of 4 .* 0.5 apart"),
        (torch.bfloat16, [[2], [5]], [(3, -1.0), (6, -1.0)], "FAULT: 1 of 4 .* inf apart"),
        (torch.bfloat16, [[2]], [(3, -1.0), (1, -1.5)], "FAULT: 1 of 4 .* inf apart"),
        (torch.float32, [[2], [5, 5]], [(5, -1.0), (3, -1.125)], "FAULT: 1 of 4 .* 0.125 apart"),
    ],
)
def test_an_answer_that_parts_is_a_near_tie_by_plain_vllms_log_probabilities_or_a_fault(
    dtype: torch.dtype,
    drafted: list[list[int]],
    candidates: list[tuple[int, float]],
    verdict: str,
    engine: Engine,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smollm2, "fast_dtype", lambda: dtype)
    engine.drafted, engine.candidates = drafted, candidates
    console = Typed(())
    refused = pytest.raises(ConfigError, match="a fault of ReDrafter: please report")
    with refused if "FAULT" in verdict else nullcontext():
        show(console, target)
    assert re.search(verdict, console.shown())
    assert "parts from plain vLLM at token 2, where" in console.shown()
    config, (asked,) = engine.jobs[1].speculative_config, engine.jobs[2].rounds
    assert config is not None and config["num_speculative_tokens"] == 12
    assert [prompt[-2:] for prompt in asked.prompts] == [[6, 2]] * 3


def test_prompts_are_written_by_the_targets_template_or_refused(target: Path) -> None:
    opened = Target.open(target)
    assert smollm2.prompts_of(opened, ["so it is"]) == [[5, 2, 3, 4, 6]]
    opened.tokenizer.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(ConfigError, match=r"a prompt: the target's .* can only "):
        smollm2.prompts_of(opened, ["so it is"])
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.chat_template = "<|extra|>" + TEMPLATE
    tokenizer.save_pretrained(target)
    with pytest.raises(ConfigError, match=r"token '<.extra.>' \(id 7\) has no row in the target's"):
        smollm2.prompts_of(Target.open(target), ["so it is"])


def test_targets_and_drafters_that_cannot_be_used_are_refused(target: Path, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert "none': no such folder" in refusal_of("demo", "--target", tmp_path / "none", **cache)
    misfit = refusal_of("demo", "--target", target, **cache)
    assert "smollm2-135m-instruct' does not fit the target" in misfit
    assert "hidden size is 576, the target's 8" in misfit


JOB = Job("t", None, "float32", [Round([[1], [2]], 4, 2), Round([[3]], 4, 1)])
READ = "import json, sys\njob = json.load(sys.stdin)\nprint('noise', file=sys.stderr)\n"
ANSWER = """for each in job["rounds"]:
    print(json.dumps({"seconds": 1.5, "answers": [each["prompts"]]}), flush=True)
"""


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Decoded]:
    """What is decoded where Python is this script."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return [*decode_in_vllm(folder, JOB)]


def test_each_round_of_a_job_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine is not waited for: this one would take an hour."""
    answered = run(f"{READ}{ANSWER}import time; time.sleep(3600)", tmp_path, monkeypatch)
    assert answered == [Decoded(1.5, [[[1], [2]]]), Decoded(1.5, [[[3]]])]
    assert (tmp_path / "vllm-without-redrafter.log").read_text() == "noise\n"


@pytest.mark.parametrize("begin", ["import sys\n", READ])
def test_a_failing_engine_shows_the_end_of_its_log(
    begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"(?s)vLLM failed; the end of .*log:.*no memory"):
        run(f"{begin}sys.exit('no memory')", tmp_path, monkeypatch)
