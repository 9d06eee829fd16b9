"""Two ranks on a CPU (gloo): every rank drafts and walks for itself, and all come to the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle_v2 as speculator
import pytest
import small_workloads
import workloads
from interpreted_engine import interpreted_engine

pytestmark = pytest.mark.engine


def test_greedy_output_on_two_ranks_equals_plain_on_one(
    small_target: Path, oracle_v2: Path, plain_v2: dict[str, list[Any]]
) -> None:
    few = workloads.Workload(small_workloads.GREEDY.prompts[:4], small_workloads.GREEDY.params[:4])
    config = {"model": str(oracle_v2), "num_speculative_tokens": 12}
    with interpreted_engine(
        small_target,
        setup=speculator.use,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        tensor_parallel_size=2,
        speculative_config=config,
    ) as llm:
        answers = llm.run(few)
        accepted = llm.counter("vllm:spec_decode_num_accepted_tokens")
    expected = [
        list(answer.outputs[0].token_ids)[: small_workloads.GREEDY_TOKENS]
        for answer in plain_v2["greedy"][:4]
    ]
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected
    assert accepted > 20, "trees were hardly used"
