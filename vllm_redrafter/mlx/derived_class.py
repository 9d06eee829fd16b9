"""Modules that go on as what they are, with one method around their own.

Wrapping a module would move its parameters in the model's tree, and hide its attributes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.nn as nn


def derive(module: nn.Module, mixin: type) -> bool:
    """Give a module, in place, a class derived from a mixin and its own; once.

    Returns:
        Whether it had none.
    """
    if isinstance(module, mixin):
        return False
    its_class: Any = type(module)
    module.__class__ = _derived(mixin, its_class)
    return True


@cache
def _derived(mixin: Any, its_class: Any) -> Any:
    return type(its_class.__name__, (mixin, its_class), {"__module__": its_class.__module__})
