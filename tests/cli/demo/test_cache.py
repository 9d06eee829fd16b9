"""What the demo makes is made once per settings, and never half."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from vllm_redrafter.cli.demo.cache import default_cache_dir, made_once


def test_artifacts_are_made_once_per_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "thing"
    made = []

    def make(settings: dict[str, int], fails: bool = False) -> None:
        with made_once(path, settings, Console(file=io.StringIO())) as needed:
            if needed:
                assert not path.exists()
                path.mkdir()
                made.append(settings)
                if fails:
                    raise KeyboardInterrupt

    make({"size": 1})
    make({"size": 1})
    assert made == [{"size": 1}]
    with pytest.raises(KeyboardInterrupt):
        make({"size": 2}, fails=True)
    make({"size": 2})
    make({"size": 2})
    assert made == [{"size": 1}, {"size": 2}, {"size": 2}]


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".thing.partial-123"
    left.mkdir()
    (left / "half").touch()
    (tmp_path / ".other.partial-123").mkdir()
    with made_once(tmp_path / "thing", {}, Console(file=io.StringIO())):
        assert not left.exists()
    assert (tmp_path / ".other.partial-123").exists()


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "vllm-redrafter" / "demo"
