# SPDX-License-Identifier: Apache-2.0
"""Hides what other packages print while a command tells what it does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def quiet_vllm() -> None:
    """vLLM's log would run through the progress bar; the environment may ask for it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what is written to standard error, C++'s warnings too."""
    quiet_vllm()
    shown, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nothing)
