# SPDX-License-Identifier: Apache-2.0
"""The server's log and /metrics show what its worker counted, where a ReDrafter speculates."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_redrafter import plugin
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.engine import published, stat_logger
from vllm_redrafter.engine.published import Publisher
from vllm_redrafter.engine.stat_logger import ReDrafterStatLogger
from vllm_redrafter.utils import names

MODELS = (f"model-{index}" for index in itertools.count())
"""Metrics are the process's: each test has a model of its own."""
FIRST = StepStats(
    steps=30,
    verifications=50,
    drafted_tokens=170,
    sampled_tokens=120,
    expected_tokens=121.5,
    undrafted_steps=10,
    matched_tokens=40,
    accepted_matched_tokens=30,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(published.DIRECTORY, raising=False)
    yield tmp_path
    published.close_directory()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines in the log."""
    lines: list[str] = []

    def say(line: str, *arguments: Any) -> None:
        lines.append(line % arguments)

    monkeypatch.setattr(stat_logger.logger, "info", say)
    monkeypatch.setattr(stat_logger.logger, "warning", say)
    return lines


def config(worker: str = names.CPU_WORKER) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=next(MODELS)),
        parallel_config=SimpleNamespace(worker_cls=worker),
    )


def metrics(vllm_config: Any, engine: int = 0) -> dict[str, float | None]:
    labels = {"model_name": vllm_config.model_config.served_model_name, "engine": str(engine)}
    return {
        name: REGISTRY.get_sample_value(f"redrafter:{name}_total", labels)
        for name in (
            "steps",
            "verifications",
            "drafted_nodes",
            "sampled_tokens",
            "expected_tokens",
            "undrafted_steps",
            "matched_nodes",
            "accepted_matched_nodes",
        )
    }


def test_metrics_are_what_the_worker_counted_by_engine() -> None:
    published.open_directory()
    publishers, vllm_config = [Publisher(0), Publisher(1)], config()
    loggers = [ReDrafterStatLogger(vllm_config, engine) for engine in (0, 1)]
    for logger in loggers:
        logger.log_engine_initialized()
    assert set(metrics(vllm_config).values()) == {0.0}
    publishers[1].publish(FIRST)
    for engine, logger in enumerate(loggers):
        logger.record(SchedulerStats(), IterationStats(), mm_cache_stats=None, engine_idx=engine)
        logger.record(SchedulerStats(), None, mm_cache_stats=None, engine_idx=engine)
    assert set(metrics(vllm_config, 0).values()) == {0.0}
    assert list(metrics(vllm_config, 1).values()) == [30, 50, 170, 120, 121.5, 10, 40, 30]


def test_the_log_tells_of_the_interval_and_is_silent_when_nothing_happened(
    said: list[str],
) -> None:
    published.open_directory()
    publisher, logger = Publisher(3), ReDrafterStatLogger(config(), 3)
    logger.log_engine_initialized()
    logger.log()
    publisher.publish(FIRST)
    logger.log()
    logger.log()
    publisher.carry(FIRST)
    publisher.publish(StepStats(undrafted_steps=4))
    logger.log()
    assert said == [
        "Engine 003: ReDrafter: 25.0 % of steps not drafted, 3.40 nodes per verification, "
        "2.40 tokens, 2.43 expected, 75 % of 40 nodes found in the text accepted",
        "Engine 003: ReDrafter: 100.0 % of steps not drafted",
    ]


def test_a_worker_elsewhere_is_said_once_and_has_no_metrics(said: list[str]) -> None:
    published.open_directory()
    vllm_config = config()
    logger = ReDrafterStatLogger(vllm_config, 2)
    logger.log_engine_initialized()
    logger.record(SchedulerStats(), None, engine_idx=2)
    logger.log()
    assert set(metrics(vllm_config, 2).values()) == {None}
    assert len(said) == 1
    assert "Engine 002: no ReDrafter counters" in said[0]


def front_end(
    folder: Path, directories: list[int]
) -> Callable[..., list[type[ReDrafterStatLogger]] | None]:
    """As AsyncLLM's start: its loggers; notes how many directories there are meanwhile."""

    def start(
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        stat_loggers: list[Any] | None = None,
        client_addresses: dict[str, str] | None = None,
        client_index: int = 0,
    ) -> list[Any] | None:
        directories.append(len(list(folder.iterdir())))
        return stat_loggers

    return start


@pytest.mark.parametrize("worker", [names.CPU_WORKER, names.CUDA_WORKER])
def test_a_front_end_gets_our_logger_and_a_directory_while_it_starts(
    folder: Path, worker: str
) -> None:
    seen: list[int] = []
    theirs = [SchedulerStats]
    start = front_end(folder, seen)
    loggers: Any = plugin.start_front_end(start, config(worker), None, True, stat_loggers=theirs)
    assert loggers == [SchedulerStats, ReDrafterStatLogger]
    assert theirs == [SchedulerStats]
    assert seen == [1]
    assert not list(folder.iterdir())


def test_the_first_of_several_api_servers_uses_the_directory_of_the_process_before(
    folder: Path,
) -> None:
    published.open_directory()
    seen: list[int] = []
    addresses = {"input_address": "tcp://"}
    loggers = [
        plugin.start_front_end(
            front_end(folder, seen), config(), None, True, None, addresses, client_index=index
        )
        for index in (1, 0)
    ]
    assert loggers == [None, [ReDrafterStatLogger]]
    assert seen == [1, 1]


@pytest.mark.parametrize(
    ("worker", "log_stats"),
    [("vllm.v1.worker.cpu_worker.CPUWorker", True), (names.CPU_WORKER, False)],
    ids=["no ReDrafter", "--disable-log-stats"],
)
def test_a_front_end_without_redrafter_or_statistics_is_left_alone(
    folder: Path, worker: str, log_stats: bool
) -> None:
    seen: list[int] = []
    start = front_end(folder, seen)
    assert plugin.start_front_end(start, config(worker), None, log_stats) is None
    assert seen == [0]
