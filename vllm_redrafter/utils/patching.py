# SPDX-License-Identifier: Apache-2.0
"""Replacing a name for a moment: for where vLLM looks a class up instead of taking an argument."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """`owner.name` is `replacement` while the body runs."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
