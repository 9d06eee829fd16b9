# SPDX-License-Identifier: Apache-2.0
"""The process of an engine, with another program for vLLM (`offline/test_generation.py` has it)."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_redrafter.cli.demo.engine import Decoded, Job, Round, decode_in_vllm
from vllm_redrafter.utils.errors import ConfigError

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
    assert run(READ + ANSWER) == [Decoded(1.5, [[[1], [2]]]), Decoded(1.5, [[[3]]])]
    assert (tmp_path / "vllm-without-redrafter.log").read_text() == "noise\n"


@pytest.mark.parametrize(
    "script", ["import sys; sys.exit('no memory')", READ + "sys.exit('no memory')"]
)
def test_a_failing_engine_shows_the_end_of_its_log(
    run: Callable[..., list[Decoded]], script: str
) -> None:
    with pytest.raises(ConfigError, match=r"(?s)vLLM failed; the end of .*log:.*no memory"):
        run(script)


def test_an_engine_ends_with_its_results(run: Callable[..., list[Decoded]]) -> None:
    """It is not waited for: this one would take an hour."""
    assert len(run(f"{READ}{ANSWER}import time; time.sleep(3600)")) == len(JOB.rounds)
