# SPDX-License-Identifier: Apache-2.0
"""Replacing names for a moment: for where vLLM looks a class up instead of taking an argument."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, /, **replacements: Any) -> Iterator[None]:
    """The owner's attributes of these names are others while the body runs."""
    originals = {name: getattr(owner, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
