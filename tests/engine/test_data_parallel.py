# SPDX-License-Identifier: Apache-2.0
"""Two engines behind one front end answer as one without speculation does, and both speculate."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import front_end, interpreted_engine
from redrafter_testing.models.families.experts import MIXTRAL
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

V2 = {**interpreted_engine.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def test_data_parallel_answers_equal_plain_on_cpu(
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    found = front_end.answers_of({}, few_tokens_target, few_tokens_drafter, data_parallel_size=2)
    assert found["answers"]["greedy"] == few_tokens_plain["greedy"]
    assert found["accepted"].keys() == {"0", "1"}
    assert all(accepted > 0 for accepted in found["accepted"].values())


def test_data_parallel_answers_of_a_mixture_of_experts_equal_plain_on_model_runner_v2(
    tmp_path: Path, few_tokens_drafter: Path
) -> None:
    """Its engines step together, one that has nothing to do as well: each has half of the
    experts."""
    target = MIXTRAL.make(tmp_path / "target")
    more: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    found = front_end.answers_of(V2, target, few_tokens_drafter, **more)
    with interpreted_engine.interpreted_engine(target, skip_tokenizer_init=True) as plain:
        expected = single_tokens_of(plain.run(few_tokens.requests("greedy")))
    assert found["answers"]["greedy"] == expected
    assert all(accepted > 0 for accepted in found["accepted"].values())
