# SPDX-License-Identifier: Apache-2.0
"""A checkpoint to convert, and a place for what it becomes."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from redrafter_testing.models.checkpoints import PROJECTED
from vllm_redrafter.checkpoints import drafter_files
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.recurrent import RecurrentHead


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all repositories that are asked for; the tests say which files."""
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **kwargs: None)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is read without asking the hub."""
    refuse = Mock(side_effect=AssertionError("the hub was asked"))
    monkeypatch.setattr(drafter_files, "hf_hub_download", refuse)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Of ours: PROJECTED's form."""
    torch.manual_seed(0)
    save_drafter(RecurrentHead(PROJECTED).requires_grad_(False), tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    """Nothing is there."""
    return tmp_path / "destination"
