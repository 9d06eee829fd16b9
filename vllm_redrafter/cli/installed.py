# SPDX-License-Identifier: Apache-2.0
"""What a command needs beside this package."""

from importlib.util import find_spec

from vllm_redrafter.utils.errors import ConfigError


def require(*packages: str, remedy: str) -> None:
    """Raise a ConfigError that names those of these packages that are not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ConfigError(f"{' and '.join(missing)} not installed: {remedy}")
