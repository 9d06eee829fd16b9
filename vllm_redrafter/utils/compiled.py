"""Loops over a few dozen numbers on the host, compiled by numba, which vLLM brings along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite.binding import ffi
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])

# While it starts, vLLM's CPU worker reads the `__dict__` of whatever stands in any module
# (`vllm/triton_utils/dispatcher.py`, 0.32 and 0.33). llvmlite's library object makes a C function
# of any name that it is asked for, of this one too, and vLLM fails at it: a second engine in one
# process would not start. It can go when vLLM looks only at what has a dict.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})


def compiled(function: Function) -> Function:
    """Compile at the first call; kept on disk, unless there is no folder that can be written."""
    return _compiled(function)


def compiled_in_any_order(function: Function) -> Function:
    """As `compiled`; sums are added up in any order, so that vector instructions can do it."""
    return _compiled(function, fastmath={"reassoc"})


def _compiled(function: Function, **options: Any) -> Function:
    try:
        made: Function = njit(cache=True, **options)(function)
    except RuntimeError:
        made = njit(**options)(function)
    return made
