# SPDX-License-Identifier: Apache-2.0
"""`ast.parse` during which nothing is collected.

Python before 3.11.8 and 3.12.2 fails if a finaliser parses meanwhile; Triton parses each kernel.
"""

import ast
import functools
import gc
from collections.abc import Callable
from typing import Any


def install() -> None:
    """For this process, from now on."""
    ast.parse = _without_collection(ast.parse)


def _without_collection(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return parse(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return undisturbed
