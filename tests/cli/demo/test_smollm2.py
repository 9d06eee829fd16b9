# SPDX-License-Identifier: Apache-2.0
"""The demo with SmolLM2: a tiny target, made-up answers, and another program for vLLM."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from redrafter_testing.engines.fake_chat import Typed
from redrafter_testing.models.families.family import word_tokenizer
from vllm_redrafter import save_drafter
from vllm_redrafter.cli.demo import smollm2
from vllm_redrafter.cli.demo.engine import Decoded, Job, Round, decode_in_vllm
from vllm_redrafter.cli.demo.smollm2 import PROMPTS
from vllm_redrafter.cli.main import app
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.utils.errors import ConfigError

WORDS = ["<unk>", "<end>", "so", "it", "is", "[user]", "[answer]"]
TEMPLATE = "[user] {{ messages[0]['content'] }} [answer]"
Shown = Callable[[dict[str, int]], str]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    config = LlamaConfig(vocab_size=len(WORDS), hidden_size=8, num_attention_heads=2)
    config.save_pretrained(folder)
    word_tokenizer(WORDS, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Those given to an engine which answers "so it is", with a drafter in two steps."""
    given: list[Job] = []

    def decode(_: Path, job: Job) -> Iterator[Decoded]:
        given.append(job)
        steps = [[2], [3, 4]] if job.speculative_config else [[2], [3], [4]]
        for each in job.rounds:
            yield Decoded(1.0 * len(steps), [steps for _ in each.prompts])

    monkeypatch.setattr(smollm2, "decode_in_vllm", decode)
    return given


@pytest.fixture
def shown(target: Path, tmp_path: Path) -> Shown:
    """What the demo prints with a drafter that records a shape."""

    def shown(shape: dict[str, int]) -> str:
        head = RecurrentHead(RecurrentConfig(len(WORDS), 8, 8))
        save_drafter(head, tmp_path / "drafter", shape=shape)
        console = Typed(())
        smollm2.run_demo(tmp_path / "cache", str(target), str(tmp_path / "drafter"), console)
        return console.shown()

    return shown


def test_the_demo_compares_and_shows_all_answers(
    jobs: list[Job], shown: Shown, tmp_path: Path
) -> None:
    shape = {"num_speculative_tokens": 5, "beam_width": 2, "beam_length": 3}
    output = shown(shape)
    plain, drafted = jobs
    assert plain.speculative_config is None
    drafter = {"model": str(tmp_path / "drafter"), "earlier_answers": 0}
    assert drafted.speculative_config == drafter | shape
    assert plain.rounds == drafted.rounds
    assert [each.in_flight for each in plain.rounds] == [1, 1, 4, 4, 8, 8]
    assert [len(each.prompts) for each in plain.rounds[::2]] == [len(PROMPTS), 12, 24]
    assert output.count("1.50×") == output.count("2.00") == output.count("yes") == 3
    assert output.count("1 of its 3 tokens were drafted, in 2 target steps") == len(PROMPTS)
    assert output.count("so\x1b[32m it\x1b[0m is") == len(PROMPTS)
    assert all(question in output for question in PROMPTS)
    assert str(tmp_path / "cache") in output


def test_a_drafter_that_records_no_shape_gets_one_and_differing_answers_are_counted(
    jobs: list[Job], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown({})
    config = jobs[1].speculative_config
    assert config is not None and config["num_speculative_tokens"] == 12

    def decode(_: Path, job: Job) -> Iterator[Decoded]:
        differing = [[[2], [3 if job.speculative_config else 4]]]
        for each in job.rounds:
            yield Decoded(1.0, [[[2], [3]]] * (len(each.prompts) - 1) + differing)

    monkeypatch.setattr(smollm2, "decode_in_vllm", decode)
    assert len(re.findall(r"no: (5 of 6|11 of 12|23 of 24)", shown({}))) == 3


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
    invoke = partial(CliRunner().invoke, app, env={"XDG_CACHE_HOME": str(tmp_path)})
    nothing = invoke(["demo", "--target", str(tmp_path / "none")])
    assert nothing.exit_code == 1 and "none': no such folder" in nothing.stderr
    misfit = invoke(["demo", "--target", str(target)])
    assert misfit.exit_code == 1
    assert "smollm2-135m-instruct' does not fit the target" in misfit.stderr
    assert "hidden size is 576, the target's 8" in misfit.stderr


JOB = Job("t", None, "float32", [Round([[1], [2]], 4, 2), Round([[3]], 4, 1)])
READ = "import json, sys\njob = json.load(sys.stdin)\nprint('noise', file=sys.stderr)\n"
ANSWER = """for each in job["rounds"]:
    print(json.dumps({"seconds": 1.5, "answers": [each["prompts"]]}), flush=True)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Decoded]]:
    def run(script: str) -> list[Decoded]:
        program = tmp_path / "python"
        program.write_text(f"#!{sys.executable}\n{script}")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        return [*decode_in_vllm(tmp_path, JOB)]

    return run


def test_each_round_of_a_job_is_decoded(run: Callable[..., list[Decoded]], tmp_path: Path) -> None:
    """And the engine is not waited for: this one would take an hour."""
    answered = run(f"{READ}{ANSWER}import time; time.sleep(3600)")
    assert answered == [Decoded(1.5, [[[1], [2]]]), Decoded(1.5, [[[3]]])]
    assert (tmp_path / "vllm-without-redrafter.log").read_text() == "noise\n"


@pytest.mark.parametrize(
    "script", ["import sys; sys.exit('no memory')", READ + "sys.exit('no memory')"]
)
def test_a_failing_engine_shows_the_end_of_its_log(
    run: Callable[..., list[Decoded]], script: str
) -> None:
    with pytest.raises(ConfigError, match=r"(?s)vLLM failed; the end of .*log:.*no memory"):
        run(script)
