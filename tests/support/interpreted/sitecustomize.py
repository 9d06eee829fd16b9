"""Triton's interpreter as vLLM's Triton, in every process that has this folder on PYTHONPATH.

vLLM uses Triton on a CPU only where Triton has a backend "cpu", and its kernels are defined while
its modules are imported: both must be settled before, in the engine's and the workers' processes
as well. Python imports `sitecustomize` before anything else.
"""

import os
from types import SimpleNamespace

import torch


def install() -> None:
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class InterpretedDriver:
        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 0)

        def get_device_interface(self) -> SimpleNamespace:
            return SimpleNamespace(synchronize=lambda: None, current_device=lambda: 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    backends["cpu"] = Backend(compiler=None, driver=InterpretedDriver)
    driver.set_active(InterpretedDriver())
    # vLLM chooses tile sizes by it.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)


if os.environ.get("TRITON_INTERPRET") == "1":
    install()
