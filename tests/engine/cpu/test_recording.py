# SPDX-License-Identifier: Apache-2.0
"""An answer with a record of its drafts is vLLM's without."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from redrafter_testing import process_trees
from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import ENVIRONMENT
from redrafter_testing.requests.workloads import Workload
from vllm_redrafter.engine.cpu import recording
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.engine

PROMPT = "def quick_sort(items):"
PROMPT_TOKENS = [5, 6, 7, 8, 5, 6]
TOKENS = 24


def test_the_command_writes_a_page_with_every_token_of_the_answer(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    page = tmp_path / "trace.html"
    command = [sys.executable, "-P", "-m", "vllm_redrafter", "trace", str(target)]
    options = ["--drafter", str(drafter), "--prompt", PROMPT, "--max-tokens", str(TOKENS)]
    # By itself, vLLM does not start where other programs have more than 8 % of the memory.
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    done = process_trees.run([*command, *options, "--html", page], 600, environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.findall(r'<script id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    data = json.loads(found[0])
    steps = data["answers"][0]["steps"]
    assert sum(step["tokens"] for step in steps) == TOKENS == len(data["plain_seconds"]) + 1
    assert f": {TOKENS} tokens in {len(steps)} steps\n" in done.stdout


def test_what_cannot_be_recorded_is_refused_before_the_engine_starts(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(prompt_length: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            recording.start_recordable(str(target), {}, "float32", prompt_length, 8)

    refused(9999, r"--prompt has 9999 tokens .* ask a shorter question")
    on_gpu = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(recording, "current_platform", on_gpu)
    refused(8, r"'cuda'.*use vLLM's CPU build")


def test_a_recorded_answer_is_plain_vllms(target: Path, drafter: Path) -> None:
    with cpu_engine(target) as plain:
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        (expected,) = plain.tokens(Workload([PROMPT_TOKENS], [params]))
    shape = {"num_speculative_tokens": 8, "beam_width": 3, "beam_length": 3}
    speculation = {"model": str(drafter), "adaptive": False, **shape}
    with cpu_engine(target, speculative_config=speculation) as engine:
        answer, steps = engine.call(recording.record_answer, PROMPT_TOKENS, TOKENS)
        undrafted = engine.call(recording.record_answer, PROMPT_TOKENS, TOKENS, (0.0, 0), False)
        sampled = engine.call(recording.record_answer, PROMPT_TOKENS, TOKENS, (1.0, 7))
    whole = [[token for step in of for token in step] for of in (answer, undrafted[0], sampled[0])]
    assert whole[0] == whole[1] == expected != whole[2]
    assert [any(step.nodes for step in of) for of in (undrafted[1], sampled[1])] == [False, True]
    assert all(of == step.output_tokens[: len(of)] for of, step in zip(answer, steps, strict=True))
    verified = [sum(node.verified for node in step.nodes) for step in steps[1:-1]]
    assert min(verified) > 1, "drafts were not recorded"
