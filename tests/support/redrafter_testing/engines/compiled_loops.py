# SPDX-License-Identifier: Apache-2.0
"""What numba compiled in a worker's process, by `Engine.rpc`."""

import sys

from numba.core.dispatcher import Dispatcher


def compiled_loops(_: object) -> dict[str, list[str]]:
    """By function: the arguments' types that it was compiled for, or read from disk for."""
    modules = [module for name, module in sys.modules.items() if name.startswith("vllm_redrafter.")]
    return {
        f"{module.__name__}.{name}": [str(types) for types in loop.signatures]
        for module in modules
        for name, loop in vars(module).items()
        if isinstance(loop, Dispatcher)
    }
