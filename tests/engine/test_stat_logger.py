# SPDX-License-Identifier: Apache-2.0
"""What a worker publishes reaches its server's log and /metrics, and leaves no files behind."""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_redrafter import plugin
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.engine import published, stat_logger
from vllm_redrafter.engine.published import Counters, Publisher, subscribe
from vllm_redrafter.engine.stat_logger import ReDrafterStatLogger
from vllm_redrafter.utils import names

MODELS = (f"model-{index}" for index in itertools.count())
"""Metrics are the process's: each test has a model of its own."""
FIRST = StepStats(
    *(30, 50, 170, 120, 121.5),
    *(40, 30, 20, 5),  # nodes of own text and accepted ones, of earlier answers and accepted ones
    undrafted_steps=10,
    decoding_seconds=2.0,
    plain_seconds=3.0,
)
METRICS = str.split("""
    steps verifications drafted_nodes sampled_tokens expected_tokens undrafted_steps
    matched_nodes accepted_matched_nodes earlier_nodes accepted_earlier_nodes
    decoding_seconds plain_seconds
""")


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
    return {name: REGISTRY.get_sample_value(f"redrafter:{name}_total", labels) for name in METRICS}


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
    assert tuple(metrics(vllm_config, 1).values()) == Counters.of(FIRST)


def test_the_log_tells_of_the_interval_and_is_silent_when_nothing_happened(said: list[str]) -> None:
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
        "2.40 tokens, 2.43 expected, 75 % of 40 nodes found in the text accepted, "
        "25 % of 20 nodes found in earlier answers accepted, 1.50 times plain's speed (estimated)",
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
    (line,) = said
    assert "Engine 002: no ReDrafter counters" in line


def start_front_end(
    folder: Path, worker: str = names.CPU_WORKER, log_stats: bool = True, **more: Any
) -> tuple[Any, int]:
    """The loggers that AsyncLLM starts with, and how many directories there are meanwhile."""

    def start(
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        stat_loggers: list[Any] | None = None,
        client_addresses: dict[str, str] | None = None,
        client_index: int = 0,
    ) -> tuple[Any, int]:
        return stat_loggers, len(list(folder.iterdir()))

    found: tuple[Any, int] = plugin.start_front_end(start, config(worker), None, log_stats, **more)
    return found


@pytest.mark.parametrize("worker", [names.CPU_WORKER, names.V2_WORKER])
def test_a_front_end_gets_our_logger_and_a_directory_while_it_starts(
    folder: Path, worker: str
) -> None:
    theirs = [SchedulerStats]
    started = start_front_end(folder, worker, stat_loggers=theirs)
    assert started == ([SchedulerStats, ReDrafterStatLogger], 1)
    assert theirs == [SchedulerStats]
    assert not list(folder.iterdir())


def test_the_first_of_several_api_servers_uses_the_directory_of_the_process_before(
    folder: Path,
) -> None:
    published.open_directory()
    more: dict[str, Any] = {"client_addresses": {"input_address": "tcp://"}}
    for index, loggers in ((1, None), (0, [ReDrafterStatLogger])):
        assert start_front_end(folder, client_index=index, **more) == (loggers, 1)


def test_a_front_end_without_redrafter_or_statistics_is_left_alone(folder: Path) -> None:
    assert start_front_end(folder, "vllm.v1.worker.cpu_worker.CPUWorker") == (None, 0)
    assert start_front_end(folder, log_stats=False) == (None, 0)


def stats(steps: int) -> StepStats:
    return StepStats(steps=steps, verifications=2 * steps, expected_tokens=4.5 * steps)


WORKER = """
import os, signal
from vllm_redrafter.engine.published import Publisher
from vllm_redrafter.drafting.stats import StepStats
Publisher(1).publish(StepStats(steps=7, verifications=14, expected_tokens=31.5))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_process_reads_what_a_worker_published_even_after_it_was_killed() -> None:
    published.open_directory()
    subprocess.run([sys.executable, "-P", "-c", WORKER], check=False)
    assert subscribe(1)() == (7, 14, 0, 0, 31.5, *[0] * 7)


def test_the_directory_s_name_is_among_what_vllm_copies_to_ray(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(published.COPIED_BY_RAY, "MINE")
    published.open_directory()
    published.open_directory()
    assert os.environ[published.COPIED_BY_RAY] == f"MINE,{published.DIRECTORY}"


def test_totals_go_on_when_statistics_are_reset_and_the_directory_is_gone(folder: Path) -> None:
    published.open_directory()
    publisher, subscriber, counted = Publisher(0), subscribe(0), stats(7)
    publisher.publish(counted)
    publisher.carry(counted)
    counted.reset()
    publisher.publish(counted)
    assert subscriber() == Counters.of(stats(7))
    # Nothing is left when both ends are connected, and they go on.
    assert list(folder.rglob("engine-0"))
    published.close_directory()
    assert not list(folder.iterdir())
    publisher.publish(stats(2))
    assert subscriber().since(Counters.of(stats(7))) == Counters.of(stats(2))


def test_a_worker_that_starts_after_the_directory_is_gone_publishes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(published.DIRECTORY, str(folder / "gone"))
    assert Publisher.if_wanted(0) is None
    assert not list(folder.iterdir())
    with pytest.raises(FileNotFoundError):
        subscribe(0)


def test_an_engine_has_one_worker_that_publishes() -> None:
    published.open_directory()
    Publisher(1)
    with pytest.raises(FileExistsError):
        Publisher(1)
