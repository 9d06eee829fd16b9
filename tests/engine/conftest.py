# SPDX-License-Identifier: Apache-2.0
"""Targets and drafters for the tests of engine/, and what vLLM answers without speculation."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.models.tiny_models import make_drafter, make_small_target
from redrafter_testing.requests import few_tokens, workloads
from redrafter_testing.requests.few_tokens import Answers
from redrafter_testing.requests.workloads import Plain
from redrafter_testing.shared_results import made_once, shared_result

FEW_TOKENS = few_tokens.VOCAB, few_tokens.HIDDEN

drafter = made_once(make_drafter, scope="session")
few_tokens_target = made_once(make_small_target, *FEW_TOKENS, scope="session")
few_tokens_drafter = made_once(make_drafter, *FEW_TOKENS, scope="session")
few_tokens_fused_drafter = made_once(make_drafter, *FEW_TOKENS, scope="session", target_layers=(1,))
"""Reads the first layer of its target as well."""


@pytest.fixture(scope="module", params=[cpu_engine, interpreted_engine], ids=["cpu", "v2"])
def start(request: pytest.FixtureRequest) -> Any:
    """How an engine of either kind is started."""
    return request.param


@pytest.fixture(scope="session")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What vLLM answers without speculation, by workload.

    Greedy answers are some tokens longer than the tests ask for: the oracle has to know the
    continuation to the end of the last tree.
    """

    def answers() -> Plain:
        known = workloads.greedy(count=64, max_tokens=128 + 8)
        loads = {"greedy": known, "mixed": workloads.MIXED}
        with cpu_engine(target) as llm:
            return {name: llm.run(load) for name, load in loads.items()}

    return shared_result(tmp_path_factory, "plain", answers)


@pytest.fixture(scope="session")
def oracle_drafter(target: Path, drafter: Path, plain: Plain) -> Path:
    """A drafter's folder from which `OracleProposer` knows all of `plain`'s answers."""
    from redrafter_testing.oracles.oracle import write_answers

    return write_answers(drafter, target, plain)


def answers_by(engine: Any) -> Any:
    """A fixture: what vLLM answers to `few_tokens.requests` without speculation."""

    @pytest.fixture(scope="session")
    def plain(few_tokens_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
        def answers() -> Answers:
            with engine(few_tokens_target) as llm:
                return few_tokens.answers_of(llm)

        return shared_result(tmp_path_factory, f"few_tokens_of_{engine.__name__}", answers)

    return plain


few_tokens_plain = answers_by(interpreted_engine)
few_tokens_plain_on_cpu = answers_by(cpu_engine)
"""Seeded samples are other ones."""
