# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: costs are those of several experts, and output is plain's.

Model Runner V2 has recordings in place of CUDA graphs.
"""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import budgets, inside_worker, timed_experts
from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.families import EXPERTS_PER_ROW, MIXTRAL
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.shared_results import made_once

pytestmark = pytest.mark.engine

ARGUMENTS: Any = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
QUESTIONS = MIXTRAL.questions(4, 24)

target = made_once(MIXTRAL.make)
drafter = made_once(make_drafter, MIXTRAL.vocab_size, MIXTRAL.hidden_size)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    """The answers of plain vLLM."""
    with interpreted_engine(target, **ARGUMENTS) as plain:
        return plain.run(QUESTIONS)


@pytest.fixture(scope="module")
def speculative(drafter: Path) -> dict[str, Any]:
    return {"model": str(drafter), "num_speculative_tokens": 8}


def test_costs_on_a_cpu_are_those_of_several_experts(
    target: Path, speculative: dict[str, Any]
) -> None:
    with cpu_engine(
        target,
        setup=timed_experts.watch_cpu,
        max_model_len=256,
        max_num_seqs=2,
        speculative_config=speculative,
    ) as llm:
        llm.rpc(timed_experts.check, {1, 4, 8, 16, 18}, EXPERTS_PER_ROW)


def test_costs_are_those_of_several_experts_and_output_equals_plain_whatever_the_budget(
    target: Path, speculative: dict[str, Any], expected: list[list[int]]
) -> None:
    with interpreted_engine(
        target,
        setup=timed_experts.watch_v2,
        enforce_eager=False,
        speculative_config=speculative,
        **ARGUMENTS,
    ) as llm:
        # The largest full graph is that of 4 trees of 9 nodes; steps of more rows read prompts.
        llm.rpc(timed_experts.check, {2, 8, 24, 36}, EXPERTS_PER_ROW)
        llm.rpc(recorded_graphs.replay, True)
        llm.rpc(budgets.force, 0.8)
        assert llm.run(QUESTIONS) == expected
        assert llm.accepted() > 5, "trees were hardly used"
        (admitted,) = llm.rpc(budgets.admitted)
        assert len({sum(step) for step in admitted}) > 3, "budgets hardly changed"
        recorded_graphs.assert_replayed(llm, 5, "model", "draft")


def test_output_of_two_ranks_with_half_of_the_experts_each_equals_plain_on_one(
    target: Path, speculative: dict[str, Any], expected: list[list[int]]
) -> None:
    with interpreted_engine(
        target,
        speculative_config=speculative,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        **ARGUMENTS,
    ) as llm:
        assert llm.rpc(inside_worker.experts_of_rank) == [[0, 1, -1, -1], [-1, -1, 0, 1]]
        assert llm.run(QUESTIONS) == expected
        assert llm.accepted() > 5, "trees were hardly used"
