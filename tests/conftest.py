# SPDX-License-Identifier: Apache-2.0
"""For all tests: the environment of this process, and of those that tests start."""

import os
import uuid
from collections import Counter
from pathlib import Path

import pytest

from redrafter_testing import left_running, undisturbed_parser
from redrafter_testing.python_path import SUPPORT, python_path

# The first process of a run names it; what xdist and tests start inherits the name.
IS_FIRST = left_running.VARIABLE not in os.environ
RUN = os.environ.setdefault(left_running.VARIABLE, uuid.uuid4().hex)

os.environ["PYTHONPATH"] = python_path(SUPPORT)

# One thread each: matrices as small as the tests' lose by a second one, and on a busy machine much.
# vLLM would bind the threads of all engines to the same cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB
# A target of a user's engine is compiled for 20 s; engine/cpu/test_parity.py does that once.
os.environ["TORCH_COMPILE_DISABLE"] = "1"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc with a function
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

undisturbed_parser.install()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from redrafter_testing.models.tiny_models import make_worded_target

    return make_worded_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def reciting_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with a chat template, and a drafter that knows what it says."""
    from redrafter_testing.models.reciting_target import make_reciting_pair

    return make_reciting_pair(tmp_path_factory.mktemp("reciting"))


def pytest_unconfigure() -> None:
    """When all has ended, nothing may be left running."""
    if IS_FIRST and (left := left_running.end_all(RUN)):
        print("\nLeft running by tests, and ended now:", *left, sep="\n  ")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes, modules that start engines or compile kernels come first, then others.

    A process that is done early then takes quick modules, not one that the others wait for.
    """
    if hasattr(config, "workerinput"):
        in_module = Counter(item.path for item in items)
        long = {item.path for item in items if item.get_closest_marker("engine")}
        long |= {path for path in in_module if path.stem == "test_compilation"}
        items.sort(key=lambda item: (item.path not in long, -in_module[item.path]))
