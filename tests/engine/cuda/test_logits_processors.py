# SPDX-License-Identifier: Apache-2.0
"""Custom logits processors see draft tokens as chains, so every request gets one."""

from pathlib import Path

import pytest
from vllm import SamplingParams

from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.models.tiny_models import make_drafter, make_small_target
from redrafter_testing.requests import workloads

pytestmark = pytest.mark.engine

VOCAB = 24  # so few that a random drafter is often right


def test_a_processor_that_reads_the_output_acts_on_every_token(tmp_path: Path) -> None:
    target = make_small_target(tmp_path / "target", vocab_size=VOCAB)
    drafter = make_drafter(tmp_path / "drafter", vocab_size=VOCAB, hidden_size=64)
    prompts = [[2 + (5 * i + t * t) % (VOCAB - 2) for t in range(5 + 4 * i)] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    with interpreted_engine(
        target,
        skip_tokenizer_init=True,
        logits_processors=["redrafter_testing.engines.no_echo:NoEcho"],
        speculative_config={"model": str(drafter), "num_speculative_tokens": 8},
    ) as llm:
        answers = llm.run(workloads.Workload(prompts, [params] * len(prompts)))
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
    for answer in answers:
        tokens = [*answer.prompt_token_ids[-2:], *answer.outputs[0].token_ids]
        assert all(a != b for a, b in zip(tokens, tokens[2:], strict=False))
    assert accepted > 4, "chains were hardly used"
