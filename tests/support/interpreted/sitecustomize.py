# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter as vLLM's Triton, in every process that has this folder on PYTHONPATH.

vLLM uses Triton on a CPU only where Triton has a backend "cpu", and its kernels are defined while
its modules are imported: both must be settled before, in the engine's and the workers' processes
as well. Python imports `sitecustomize` before anything else; of the processes, many import no vLLM.
"""

import functools
import os
import sys
from types import SimpleNamespace


class BeforeVllm:
    """Finds no module; the first import of vLLM makes it settle both."""

    def find_spec(self, name, path, target=None):
        if name == "vllm":
            sys.meta_path.remove(self)
            install()
            hurry()


def install() -> None:
    import torch
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
    allow_integer_masks()


def allow_integer_masks() -> None:
    """As a GPU does; vLLM's kernels for grammars and n-grams have some."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def create_masked_load(builder, pointers, mask, *rest):
        mask.data = mask.data.astype(bool)
        return load(builder, pointers, mask, *rest)

    def create_masked_store(builder, pointers, value, mask, *rest):
        mask.data = mask.data.astype(bool)
        return store(builder, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store


def hurry() -> None:
    """Leave out what the interpreter does again for every launch and operation: 3 times faster."""
    import triton.language as tl
    from triton.runtime import interpreter

    from redrafter_testing.gpu import interpreter_speed

    for owner, name, value in interpreter_speed.replacements():
        setattr(owner, name, value)
    # For the functions of all modules at once, and never undone: nothing is compiled here.
    everywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    once = functools.cache(functools.partial(interpreter._patch_lang, everywhere))

    def patch_lang(function):
        once()
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path.insert(0, BeforeVllm())
