# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the target: output with speculation equals output without."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.models.lora_adapters import ARGUMENTS, Adapted, make_adapter

pytestmark = pytest.mark.engine

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory, few_tokens_target: Path) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [make_adapter(folder / str(seed), few_tokens_target, seed) for seed in (0, 1)]
    return Adapted((adapters[0], adapters[1]), count=6)


@pytest.fixture(scope="module")
def expected(few_tokens_target: Path, requests: Adapted) -> list[list[int]]:
    with cpu_engine(few_tokens_target, skip_tokenizer_init=True, **ARGUMENTS) as llm:
        return llm.run(requests)


@pytest.fixture(scope="module")
def arguments(few_tokens_fused_drafter: Path) -> dict[str, Any]:
    drafter = str(few_tokens_fused_drafter)
    speculative = {"model": drafter, "num_speculative_tokens": 8, "adaptive": False}
    return {"skip_tokenizer_init": True, "speculative_config": speculative, **ARGUMENTS}


def test_every_request_is_answered_with_its_adapter(
    few_tokens_target: Path,
    few_tokens_plain: dict[str, list[list[int]]],
    requests: Adapted,
    expected: list[list[int]],
    arguments: dict[str, Any],
) -> None:
    with cpu_engine(few_tokens_target, **arguments) as llm:
        assert llm.run(requests) == expected
        accepted = llm.counter(ACCEPTED)
    assert accepted > 10, "trees were hardly used"
    without = few_tokens_plain["greedy"][: requests.count]
    same = [a == b for a, b in zip(expected, without, strict=True)]
    assert same == [True, False, False] * 2, "adapters made no difference"
