# SPDX-License-Identifier: Apache-2.0
"""What decodes here: vLLM, or mlx-lm where vLLM is not installed (a Mac)."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

from vllm_redrafter.utils.errors import ConfigError

Backend = Literal["vllm", "mlx"]

INSTALL_MLX = "pip install '.[mlx]' in a checkout"


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def serving_backend(installed: Callable[[str], bool] = is_installed) -> Backend:
    """vLLM, if it is installed; else mlx-lm; else a ConfigError."""
    if installed("vllm"):
        return "vllm"
    if installed("mlx_lm"):
        return "mlx"
    raise ConfigError(
        "neither vLLM nor mlx-lm is installed: pip install 'vllm-redrafter[cpu]' or "
        f"'vllm-redrafter[cuda]'; on a Mac, {INSTALL_MLX}"
    )


def require_mlx(installed: Callable[[str], bool] = is_installed) -> None:
    """Raise a ConfigError without mlx-lm or mlx: on Linux the one comes without the other."""
    if missing := [name for name in ("mlx", "mlx_lm") if not installed(name)]:
        raise ConfigError(f"{' and '.join(missing)} not installed: {INSTALL_MLX}")
