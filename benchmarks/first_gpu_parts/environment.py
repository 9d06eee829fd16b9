# SPDX-License-Identifier: Apache-2.0
"""The machine and its software, and whether they are what the CUDA engine needs.

    cd benchmarks && python -m first_gpu_parts.environment --output environment.json

Ends with status 1 where something is missing, and says what.
"""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch
from shared_parts import machine, results
from shared_parts.arguments import script_parser
from shared_parts.gpu import software


def main() -> int:
    output = script_parser(__doc__).parse_args().output
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)
    found = {
        **machine.describe(torch.cuda.get_device_name()),
        "capability": torch.cuda.get_device_capability(),
        **software(),
        "missing": missing(),
    }
    results.write(output, found)
    for name, value in found.items():
        print(f"{name}: {value}")
    return 1 if found["missing"] else 0


def missing() -> list[str]:
    """What the CUDA engine needs and does not find, a sentence each."""
    import vllm
    from vllm.platforms import current_platform

    from vllm_redrafter.engine.vllm_interface import first_change

    plugins = metadata.entry_points(group="vllm.general_plugins")
    change = first_change(Path(vllm.__file__).parents[1], "v2")
    wanted = {
        "vLLM does not take this machine for one with CUDA": current_platform.is_cuda(),
        f"vLLM {vllm.__version__} is not supported: {change}": change is None,
        "the package is not installed as vLLM's plugin: `pip install -e .` does it": (
            "redrafter" in plugins.names
        ),
    }
    return [reason for reason, holds in wanted.items() if not holds]


if __name__ == "__main__":
    sys.exit(main())
