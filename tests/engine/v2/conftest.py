# SPDX-License-Identifier: Apache-2.0
"""Targets and engines for Model Runner V2: as small as they can be, the interpreter is slow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu.host_event import HostEvent
from redrafter_testing.models.tiny_models import add_tokenizer, make_drafter, make_small_target
from redrafter_testing.requests import small_workloads
from redrafter_testing.requests.workloads import Plain
from redrafter_testing.shared_results import made_once, shared_result

small_target = made_once(lambda folder: add_tokenizer(make_small_target(folder)), scope="session")
small_drafter = made_once(make_drafter, hidden_size=64, scope="session")


@pytest.fixture
def host_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """What measures times on a CPU."""
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)


@pytest.fixture(scope="session")
def plain_v2(small_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What Model Runner V2 answers without speculation, by workload."""

    def answers() -> Plain:
        with interpreted_engine(small_target, reasoning_config=small_workloads.REASONING) as llm:
            return {name: llm.run(load) for name, load in small_workloads.ALL.items()}

    return shared_result(tmp_path_factory, "plain_v2", answers)


@pytest.fixture(scope="session")
def oracle_v2(small_target: Path, small_drafter: Path, plain_v2: Plain) -> Path:
    """A drafter's folder from which `OracleSpeculator` knows all of these answers."""
    from redrafter_testing.oracles.oracle import write_answers

    return write_answers(small_drafter, small_target, plain_v2)


@pytest.fixture(scope="session")
def oracle(small_target: Path, oracle_v2: Path) -> Iterator[Any]:
    """Speculates well, scheduled asynchronously, with chunks forced and a KV cache too small."""
    from redrafter_testing.oracles import oracle_v2 as speculator

    with interpreted_engine(
        small_target,
        setup=(speculator.use, speculator.schedule_asynchronously),
        attention_kernels=True,
        speculative_config={"model": str(oracle_v2), "num_speculative_tokens": 12},
        reasoning_config=small_workloads.REASONING,
        **small_workloads.TIGHT,
    ) as llm:
        yield llm
