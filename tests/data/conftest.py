# SPDX-License-Identifier: Apache-2.0
"""Targets, of which only the tokenizer is read."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING, REWRITING
from redrafter_testing.engines.generation_runs import make_folder


@pytest.fixture(scope="package")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    templates = {"appending": APPENDING, "rewriting": REWRITING, "plain": None}
    return {
        name: make_folder(tmp_path_factory.mktemp(name) / "target", template)
        for name, template in templates.items()
    }


@pytest.fixture(scope="package")
def target(targets: dict[str, Path]) -> Path:
    return targets["appending"]


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Any:
    return AutoTokenizer.from_pretrained(target)
