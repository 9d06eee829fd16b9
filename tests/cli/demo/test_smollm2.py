# SPDX-License-Identifier: Apache-2.0
"""The demo with SmolLM2: a tiny target, made-up answers, and another program for vLLM."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

from redrafter_testing.engines.fake_chat import Typed
from redrafter_testing.models.families.family import word_tokenizer
from redrafter_testing.own_commands import refusal_of
from vllm_redrafter import save_drafter
from vllm_redrafter.cli.demo import smollm2
from vllm_redrafter.cli.demo.engine import Decoded, Round, vllm_process
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
    """It answers "so it is", with a drafter in two steps; what both are given is kept."""

    plain, drafted, dtype = [[2], [3], [4]], [[2], [3, 4]], torch.bfloat16
    candidates: Sequence[tuple[int, float]] = ()

    def __init__(self) -> None:
        self.rounds: list[tuple[Any, Round]] = []

    @contextmanager
    def process(self, _: Path, config: Any = None, **_arguments: Any) -> Iterator[Any]:
        def decode(each: Round) -> Decoded:
            self.rounds.append((config, each))
            if each.candidates:
                return Decoded(0.0, [], [[*self.candidates] for _ in each.prompts])
            steps, last = (Engine.drafted, self.drafted) if config else (self.plain, self.plain)
            answers = [steps] * (len(each.prompts) - 1) + [last]
            sources = [["target", "match", "target"]] * (len(each.prompts) - 1)
            sources.append(["target", "drafter", "target"][: sum(map(len, last))])
            return Decoded(1.0 * len(steps), answers, sources=sources)

        yield decode


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(smollm2, "vllm_process", (engine := Engine()).process)
    monkeypatch.setattr(smollm2, "fast_dtype", lambda: engine.dtype)
    return engine


def show(console: Typed, target: Path, shape: Mapping[str, int] = MappingProxyType({})) -> str:
    """What the demo prints with a drafter that records a shape."""
    drafter = target.with_name("drafter")
    save_drafter(RecurrentHead(RecurrentConfig(len(WORDS), 8, 8)), drafter, shape={**shape})
    smollm2.run_demo(target.with_name("cache"), str(target), str(drafter), console)
    return console.shown()


def test_the_demo_compares_in_turns_and_shows_all_answers(engine: Engine, target: Path) -> None:
    shape = {"num_speculative_tokens": 5, "beam_width": 2, "beam_length": 3}
    output = show(Typed(()), target, shape)
    drafter = {"model": str(target.with_name("drafter")), "earlier_answers": 0}
    *turns, shown, _ = engine.rounds
    assert [config for config, _ in turns] == [None, drafter | shape] * 6
    rounds = [each for _, each in turns[::2]]
    assert rounds == [each for _, each in turns[1::2]] and not any(r.is_recorded for r in rounds)
    sizes = [(n, prompts, most) for n, prompts in ((1, 4), (4, 12), (8, 24)) for most in (32, 64)]
    assert [(r.in_flight, len(r.prompts), r.max_tokens) for r in rounds] == sizes
    assert shown == (drafter | shape, Round(rounds[1].prompts, 64, 1, is_recorded=True))
    assert output.count("1.50×") == output.count("2.00") == 3
    assert all(f"{n} of {n}: {n} equal" in output for n in (len(PROMPTS), 12, 24))
    said = "1 of its 3 tokens were drafted (1 of them found in the text), in 2 target steps; equal"
    assert output.count(said) == output.count("so\x1b[7;36m it\x1b[0m is") == len(PROMPTS) - 1
    assert output.count("drafted, in 2") == output.count("so\x1b[4;32m it\x1b[0m is") == 1
    assert all(text in output for text in [*PROMPTS, str(target.with_name("cache"))])


@pytest.mark.parametrize(
    ("dtype", "drafted", "told", "said"),
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
    dtype: torch.dtype, drafted: Any, told: Any, said: str, engine: Engine, target: Path
) -> None:
    engine.dtype, engine.drafted, engine.candidates = dtype, drafted, told
    console = Typed(())
    refused = pytest.raises(ConfigError, match="a fault of ReDrafter: please report")
    with refused if "FAULT" in said else nullcontext():
        show(console, target)
    assert re.search(said, console.shown())
    assert "parts from plain vLLM at token 2, where" in console.shown()
    assert (engine.rounds[1][0]["num_speculative_tokens"], engine.rounds[-1][0]) == (12, None)
    assert [prompt[-2:] for prompt in engine.rounds[-1][1].prompts] == [[6, 2]] * 4


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
    assert "135m-instruct' does not fit" in misfit and "is 576, the target's 8" in misfit


ROUNDS = [Round([[1], [2]], 4, 2), Round([[3]], 4, 1)]
ANSWERING = """import json, sys, time
print(json.loads(sys.argv[-1])["max_num_seqs"], file=sys.stderr, flush=True)
for line in sys.stdin:
    print(json.dumps({"seconds": 1.5, "answers": [json.loads(line)["prompts"]]}), flush=True)
time.sleep(3600)
"""


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Decoded]:
    """What is decoded where Python is this script."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with vllm_process(folder, max_num_seqs=2) as decode:
        return [decode(each) for each in ROUNDS]


def test_rounds_are_decoded_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine is not waited for at the end: this one would take an hour."""
    answered = run(ANSWERING, tmp_path, monkeypatch)
    assert answered == [Decoded(1.5, [[[1], [2]]]), Decoded(1.5, [[[3]]])]
    assert (tmp_path / "vllm-without-redrafter.log").read_text() == "2\n"


@pytest.mark.parametrize("begin", ["import sys\n", "import sys\ninput()\n"])
def test_a_failing_engine_shows_the_end_of_its_log(
    begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"(?s)vLLM failed; the end of .*log:.*no memory"):
        run(f"{begin}sys.exit('no memory')", tmp_path, monkeypatch)
