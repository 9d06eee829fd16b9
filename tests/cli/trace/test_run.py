"""What the command refuses before it starts an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_redrafter.cli.trace.run import trace
from vllm_redrafter.utils.errors import ConfigError


def test_a_page_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/a.html'.*no such folder"):
        trace(tmp_path, None, "Hello", 8, tmp_path / "missing" / "a.html")


def test_a_page_where_a_folder_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        trace(tmp_path, None, "Hello", 8, tmp_path)


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt ' '"):
        trace(tmp_path, None, " ", 8, tmp_path / "a.html")


def test_a_target_that_is_no_models_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        trace(tmp_path, None, "Hello", 8, tmp_path / "a.html")
