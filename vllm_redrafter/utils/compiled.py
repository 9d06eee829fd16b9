# SPDX-License-Identifier: Apache-2.0
"""Loops over a few dozen numbers on the host, compiled by numba, which vLLM brings along.

A step of a small target takes milliseconds; a hundred calls of torch would be a large part of it.
"""

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt
from llvmlite.binding import ffi
from numba import config, njit

from vllm_redrafter.utils.files import user_cache
from vllm_redrafter.utils.patching import patched

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

# vLLM's CPU worker reads the `__dict__` of all that stands in any module when it starts
# (`vllm/triton_utils/dispatcher.py`, 0.32 and 0.33). llvmlite's library object makes a C function
# of that name, and vLLM fails at it: a second engine in one process would not start.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})


def _cache_folder() -> Path | None:
    """One for each content of this package; None where there is no folder that can be written.

    What a function takes from other modules is compiled in, and numba looks at its own file alone.
    """
    modules = sorted(Path(__file__).parents[1].rglob("*.py"))
    content = blake2b(b"".join(module.read_bytes() for module in modules), digest_size=8)
    try:
        folder = Path(config.CACHE_DIR or user_cache() / "compiled") / content.hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the latter: no home
        return None
    return folder if os.access(folder, os.W_OK) else None


FOLDER = _cache_folder()


def compiled(function: Function, **options: Any) -> Function:
    """Compile at the first call, with numba's `options`; kept on disk if `FOLDER` is some."""
    with patched(config, CACHE_DIR=str(FOLDER or "")):
        made: Function = njit(cache=FOLDER is not None, **options)(function)
    return made
