"""What tests in several processes share is made once, and is the same in all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redrafter_testing.shared_results import shared_result


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> list[int]:
        self.calls += 1
        return [self.calls]


def ask(folder: Path, make: Maker, process: int, name: str = "result") -> list[int]:
    """As pytest-xdist's process of that number does."""
    factory: Any = SimpleNamespace(getbasetemp=lambda: folder / f"popen-gw{process}")
    return shared_result(factory, name, make)


def test_of_several_processes_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    make = Maker()
    with ThreadPoolExecutor(4) as processes:
        assert list(processes.map(lambda i: ask(tmp_path, make, i), range(4))) == [[1]] * 4
    assert ask(tmp_path, make, 0, "another") == [2]


def test_a_single_process_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    make = Maker()
    assert [ask(tmp_path, make, 0) for _ in range(2)] == [[1], [2]]
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_made_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    broken: Any = lambda: 1 // 0  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        ask(tmp_path, broken, 0)
    assert ask(tmp_path, Maker(), 1) == [1]
