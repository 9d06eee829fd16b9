# SPDX-License-Identifier: Apache-2.0
"""Compiled loops, and what importing numba must not break."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_redrafter.utils import compiled as module


def test_an_engine_can_start_after_numba_is_loaded() -> None:
    """vLLM's CPU worker reads the dict of whatever stands in any module, llvmlite's too."""
    code = """
import sys
import vllm_redrafter.drafting.ranking
for module in list(sys.modules.values()):
    for value in list(getattr(module, "__dict__", {}).values()):
        ours = str(type(value).__module__).startswith("llvmlite")
        if ours and hasattr(value, "__dict__"):
            vars(value).get("kernel")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


CALLER = """
from package.constants import LONGEST
from package.utils.compiled import compiled

@compiled
def longest():
    return LONGEST
"""
ASK = "from package.caller import longest; print(longest(), sum(longest.stats.cache_hits.values()))"


@pytest.mark.parametrize("writable", [True, False])
def test_what_another_module_holds_is_compiled_anew_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    package, cache = tmp_path / "package", tmp_path / "cache"
    (package / "utils").mkdir(parents=True)
    shutil.copy(str(module.__file__), package / "utils" / "compiled.py")
    (package / "caller.py").write_text(CALLER)
    if not writable:
        cache.write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    said = []
    values = (5, 5, 8, 8) if writable else (5, 8)
    for value in values:
        (package / "constants.py").write_text(f"LONGEST = {value}\n")
        # -B: bytecode of a former text of the same second and size would be taken for this one's.
        run = [sys.executable, "-B", "-c", ASK]
        said.append(subprocess.run(run, cwd=tmp_path, check=True, capture_output=True).stdout)
    hits = (0, 1, 0, 1) if writable else (0, 0)
    expected = [f"{value} {hit}\n" for value, hit in zip(values, hits, strict=True)]
    assert [line.decode() for line in said] == expected
