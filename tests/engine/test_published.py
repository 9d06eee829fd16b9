# SPDX-License-Identifier: Apache-2.0
"""What a worker publishes reaches a front end in another process, and leaves no files behind."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.engine import published
from vllm_redrafter.engine.published import Counters, Publisher, Subscriber


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where directories for counters are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(published.DIRECTORY, raising=False)
    yield tmp_path
    published.close_directory()


def stats(steps: int) -> StepStats:
    return StepStats(steps=steps, verifications=2 * steps, expected_tokens=4.5 * steps)


WORKER = """
import os, signal
from vllm_redrafter.engine.published import Publisher
from vllm_redrafter.drafting.stats import StepStats
Publisher(1).publish(StepStats(steps=7, verifications=14, expected_tokens=31.5))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_process_reads_what_a_worker_published_even_after_it_was_killed(
    folder: Path,
) -> None:
    published.open_directory()
    subprocess.run([sys.executable, "-P", "-c", WORKER], check=False)
    assert Subscriber(1).read() == (7, 14, 0, 0, 31.5, 0, 0, 0)


def test_the_directory_s_name_is_among_what_vllm_copies_to_ray(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(published.COPIED_BY_RAY, "MINE")
    published.open_directory()
    published.open_directory()
    assert os.environ[published.COPIED_BY_RAY] == f"MINE,{published.DIRECTORY}"


def test_totals_go_on_when_statistics_are_reset(folder: Path) -> None:
    published.open_directory()
    publisher, subscriber, counted = Publisher(0), Subscriber(0), stats(7)
    publisher.publish(counted)
    publisher.carry(counted)
    counted.reset()
    publisher.publish(counted)
    assert subscriber.read() == Counters.of(stats(7))
    publisher.publish(stats(2))
    assert subscriber.read().since(Counters.of(stats(7))) == Counters.of(stats(2))


def test_nothing_is_left_when_both_ends_are_connected_and_they_go_on(folder: Path) -> None:
    published.open_directory()
    publisher, subscriber = Publisher(0), Subscriber(0)
    assert list(folder.rglob("engine-0"))
    published.close_directory()
    assert not list(folder.iterdir())
    publisher.publish(stats(4))
    assert subscriber.read() == Counters.of(stats(4))


def test_a_worker_that_starts_after_the_directory_is_gone_counts_for_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(published.DIRECTORY, str(folder / "gone"))
    Publisher(0).publish(stats(4))
    assert not list(folder.iterdir())
    with pytest.raises(FileNotFoundError):
        Subscriber(0)


def test_engines_have_counters_of_their_own_and_one_worker_each(folder: Path) -> None:
    published.open_directory()
    for engine, steps in ((0, 2), (1, 6)):
        Publisher(engine).publish(stats(steps))
    assert [Subscriber(engine).read().steps for engine in (0, 1)] == [2, 6]
    with pytest.raises(FileExistsError):
        Publisher(1)
    with pytest.raises(FileNotFoundError):
        Subscriber(2)
