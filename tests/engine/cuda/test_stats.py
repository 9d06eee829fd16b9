# SPDX-License-Identifier: Apache-2.0
"""What the step's meter counts, and what of it reaches a front end."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_redrafter.engine import published
from vllm_redrafter.engine.cuda.stats import StepTimer
from vllm_redrafter.engine.published import Counters, Publisher, Subscriber


@pytest.fixture
def meter(host_events: None) -> StepTimer:
    return StepTimer(torch.device("cpu"))


@pytest.fixture
def subscriber(
    meter: StepTimer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Subscriber]:
    """Reads what the meter publishes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(published.DIRECTORY, raising=False)
    published.open_directory()
    meter.publisher = Publisher(engine=0)
    yield Subscriber(engine=0)
    published.close_directory()


def step(meter: StepTimer) -> None:
    """Three requests: one verifies a tree of 3 nodes and accepts one, the tree of another was
    trimmed to its root, one is in its prompt. Two of the nodes are on a path, one is accepted."""
    batch: Any = SimpleNamespace(num_draft_tokens_per_req=np.array([2, 2, 0]))
    with meter.measure("draft"):
        meter.count(batch, torch.tensor([3, 1, 1]), torch.tensor([2, 1, 1]))
    meter.count_matches(lambda: torch.tensor([2, 1]))
    meter.expect(1.5)
    meter.count_undrafted()
    meter.publish()


def test_what_the_device_counted_reaches_the_front_end_a_step_late(
    meter: StepTimer, subscriber: Subscriber
) -> None:
    step(meter)
    assert subscriber.read() == Counters(1, 0, 0, 0, 1.5, 1, 0, 0)
    step(meter)
    assert subscriber.read() == Counters(2, 1, 2, 2, 3.0, 2, 2, 1)
    meter.publish()
    assert subscriber.read() == Counters(2, 2, 4, 4, 3.0, 2, 4, 2)


def test_a_reset_takes_nothing_from_the_front_ends_totals(
    meter: StepTimer, subscriber: Subscriber
) -> None:
    step(meter)
    assert meter.read().draft == 0, "times are taken from the first reset on"
    meter.reset()
    step(meter)
    meter.publish()
    assert subscriber.read() == Counters(2, 2, 4, 4, 3.0, 2, 4, 2)
    assert Counters.of(meter.read()) == Counters(1, 1, 2, 2, 1.5, 1, 2, 1)
    assert meter.read().draft > 0
