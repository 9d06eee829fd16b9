# SPDX-License-Identifier: Apache-2.0
"""Results that are expensive and always the same, made once however many processes run tests."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from filelock import FileLock

Result = TypeVar("Result")


def shared_result(factory: pytest.TempPathFactory, name: str, make: Callable[[], Result]) -> Result:
    """What `make()` returns, called by the first of pytest-xdist's processes that asks."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    file = factory.getbasetemp().parent / f"{name}.pickle"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(make()))
        return pickle.loads(file.read_bytes())


def made_once(make: Callable[..., Path], *sizes: Any, scope: Any = "module", **more: Any) -> Any:
    """A fixture: what `make` puts into a new folder."""

    @pytest.fixture(scope=scope)
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make(tmp_path_factory.mktemp("made"), *sizes, **more)

    return folder
