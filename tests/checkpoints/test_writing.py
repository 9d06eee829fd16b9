# SPDX-License-Identifier: Apache-2.0
"""What is written can be read, by whoever may read other new files."""

import os
from pathlib import Path

import pytest

from redrafter_testing.models.checkpoints import PLAIN
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.heads.recurrent import RecurrentHead


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_its_files_have_the_mode_of_any_new_file(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        save_drafter(RecurrentHead(PLAIN), tmp_path / "drafter")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "drafter").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~mask)
