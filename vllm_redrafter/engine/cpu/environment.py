# SPDX-License-Identifier: Apache-2.0
"""The environment variables that a process with a CPU engine is started with."""

import ctypes.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

HUGE_PAGES = "glibc.malloc.hugetlb"


def cpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What is set on top of `environment`, whose own settings are kept: memory and libraries.

    Intel's OpenMP runtime and tcmalloc, with which vLLM's CPU kernels are fast, only work
    preloaded. glibc asks for huge pages: with small ones, engines' speeds differ from start to
    start.
    """
    tuned = environment.get("GLIBC_TUNABLES", "")
    if HUGE_PAGES not in tuned:  # glibc 2.35 and later; others ignore it
        tuned = ":".join(filter(None, [tuned, f"{HUGE_PAGES}=1"]))
    return {
        "VLLM_CPU_KVCACHE_SPACE": environment.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "LD_PRELOAD": _preload(environment.get("LD_PRELOAD", "")),
        "GLIBC_TUNABLES": tuned,
    }


def _preload(preloaded: str) -> str:
    """What is preloaded already, then fast libraries of other kinds: vLLM refuses two OpenMPs."""
    paths = [path for path in preloaded.split(":") if path]
    kinds = [kind for kind in ("omp", "tcmalloc") if not any(kind in path for path in paths)]
    fast = [path for path in _fast_libraries() if any(kind in Path(path).name for kind in kinds)]
    return ":".join(dict.fromkeys([*paths, *fast]))


def _fast_libraries() -> Iterator[str]:
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    if openmp.is_file():
        yield str(openmp)
    folders = [Path(sys.prefix, "lib"), *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    for folder in folders:
        for path in sorted(folder.glob("libtcmalloc_minimal.so.*")):
            yield str(path)
            return
    # A name, where only the dynamic linker knows the path.
    if name := ctypes.util.find_library("tcmalloc_minimal"):
        yield name
