# SPDX-License-Identifier: Apache-2.0
"""The environment of a CPU engine: which libraries are preloaded."""

import sys
from pathlib import Path

import pytest

from vllm_redrafter.engine.cpu.environment import cpu_variables


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """OpenMP and tcmalloc, installed beside this Python."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    paths = [tmp_path / "lib" / name for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")]
    paths[0].parent.mkdir()
    for path in paths:
        path.touch()
    return str(paths[0]), str(paths[1])


@pytest.mark.parametrize(
    ("before", "added"),
    [
        ("", (0, 1)),
        ("/mine.so", (0, 1)),
        ("/torch/libgomp.so.1", (1,)),
        ("/usr/lib/libtcmalloc.so.4", (0,)),
        ("/libomp.so:/libtcmalloc.so", ()),
    ],
)
def test_one_library_of_each_kind_is_preloaded_after_the_users_own(
    libraries: tuple[str, str], before: str, added: tuple[int, ...]
) -> None:
    expected = [*filter(None, before.split(":")), *(libraries[i] for i in added)]
    assert cpu_variables({"LD_PRELOAD": before})["LD_PRELOAD"].split(":") == expected


def test_what_the_dynamic_linker_finds_is_preloaded_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.4")
    assert cpu_variables({})["LD_PRELOAD"] == "libtcmalloc_minimal.so.4"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", None, "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "4", "4"),
        ("GLIBC_TUNABLES", "", "glibc.malloc.hugetlb=1"),
        (
            "GLIBC_TUNABLES",
            "glibc.malloc.perturb=7",
            "glibc.malloc.perturb=7:glibc.malloc.hugetlb=1",
        ),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_users_own_settings_are_kept(name: str, before: str | None, after: str) -> None:
    assert cpu_variables({} if before is None else {name: before})[name] == after
