# SPDX-License-Identifier: Apache-2.0
"""Chains on the CPU engine: where the target's attention allows no trees, or where they are asked
for. Output is plain vLLM's, greedily and with seeds."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine, measure_briefly
from redrafter_testing.models.families.chained import CHAINED
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

COUNT, TOKENS = 6, 40
SHAPE = {"num_speculative_tokens": 6, "beam_width": 3, "beam_length": 4}
FAMILIES = [family for family in CHAINED if "cpu" in family.engines]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_output_equals_plain(family: Family, tmp_path: Path) -> None:
    target = family.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", family.vocab_size, family.hidden_size)
    arguments = {"skip_tokenizer_init": True, "max_model_len": 256, **family.arguments}
    asked = family.questions(COUNT, TOKENS)
    with cpu_engine(target, **arguments) as plain:
        expected = plain.run(asked)
    arguments["max_num_batched_tokens"] = 96
    for setup, adaptive in ((None, False), (measure_briefly, True)):
        speculative = {"model": str(drafter), **SHAPE, "adaptive": adaptive}
        with cpu_engine(target, setup=setup, speculative_config=speculative, **arguments) as llm:
            assert llm.run(asked) == expected
            (stats,) = llm.rpc("redrafter_stats")
            assert stats["sampled_tokens"] > stats["verifications"] > 10 or adaptive
            assert stats["attention"] == 0.0, "trees were verified"


def test_output_of_chains_that_are_asked_for_equals_plain(
    few_tokens_target: Path, few_tokens_drafter: Path
) -> None:
    speculative: dict[str, Any] = {
        "model": str(few_tokens_drafter),
        **SHAPE,
        "tree": "chain",
        "adaptive": False,
    }
    asked = {name: few_tokens.requests(name) for name in few_tokens.SAMPLING}
    with cpu_engine(few_tokens_target, skip_tokenizer_init=True) as plain:
        expected = {name: single_tokens_of(plain.run(load)) for name, load in asked.items()}
    with cpu_engine(
        few_tokens_target,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        max_model_len=256,
        num_gpu_blocks_override=12,
    ) as llm:
        for name, load in asked.items():
            assert single_tokens_of(llm.run(load)) == expected[name]
        (stats,) = llm.rpc("redrafter_stats")
        assert llm.counter("vllm:num_preemptions") > 0
    assert stats["sampled_tokens"] > 1.1 * stats["verifications"]
    assert stats["accepted_matched_tokens"] > 0
    assert stats["attention"] == 0.0, "trees were verified"
