# SPDX-License-Identifier: Apache-2.0
"""Workers of Ray, on two nodes: output equals plain's, and what is counted arrives."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from redrafter_testing.engines import cpu_engine, forked_engine, front_end, interpreted_engine
from redrafter_testing.engines.ray_cluster import ray_cluster
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

Answers = dict[str, list[list[int]]]
SAMPLINGS = tuple(few_tokens.SAMPLING)
SEPARATE_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Not in the process of the front end, as in a server."""


@pytest.fixture(scope="module")
def cpu_cluster() -> Iterator[dict[str, str]]:
    with ray_cluster(forked_engine.ENVIRONMENT | SEPARATE_CORE, 2) as environment:
        yield environment


@pytest.fixture(scope="module")
def cpu_plain(few_tokens_target: Path) -> Answers:
    with cpu_engine.cpu_engine(few_tokens_target, skip_tokenizer_init=True) as plain:
        return {s: single_tokens_of(plain.run(few_tokens.requests(s))) for s in SAMPLINGS}


def test_an_engine_in_a_worker_of_ray_answers_as_plain_and_its_death_is_an_error(
    cpu_cluster: dict[str, str],
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    cpu_plain: Answers,
) -> None:
    found = front_end.answers_of(
        cpu_cluster,
        few_tokens_target,
        few_tokens_drafter,
        SAMPLINGS,
        kills_a_worker=True,
        distributed_executor_backend="ray",
    )
    assert found["answers"] == cpu_plain
    assert found["accepted"]["0"] > 0 and found["verified"]["0"] > 0
    assert found["error"] == "EngineDeadError"


def test_data_parallel_engines_of_ray_answer_as_plain_and_are_counted(
    cpu_cluster: dict[str, str],
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    cpu_plain: Answers,
) -> None:
    found = front_end.answers_of(
        cpu_cluster,
        few_tokens_target,
        few_tokens_drafter,
        SAMPLINGS,
        data_parallel_size=2,
        data_parallel_backend="ray",
    )
    assert found["answers"] == cpu_plain
    for counted in (found["accepted"], found["verified"]):
        assert counted.keys() == {"0", "1"} and all(counted.values())


def test_two_ranks_on_two_nodes_answer_as_plain_on_model_runner_v2(
    few_tokens_target: Path, few_tokens_fused_drafter: Path, few_tokens_plain: Answers
) -> None:
    with ray_cluster(interpreted_engine.ENVIRONMENT | SEPARATE_CORE, 1, 1) as environment:
        found = front_end.answers_of(
            environment,
            few_tokens_target,
            few_tokens_fused_drafter,
            SAMPLINGS,
            count=3,
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
        )
    assert found["answers"] == {s: few_tokens_plain[s][:3] for s in SAMPLINGS}
    assert found["accepted"]["0"] > 0 and found["verified"]["0"] > 0
