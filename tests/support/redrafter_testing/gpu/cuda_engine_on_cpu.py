# SPDX-License-Identifier: Apache-2.0
"""Lets the plugin choose the CUDA engine on a CPU, with `InterpretedWorker`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

WORKER = "redrafter_testing.gpu.interpreted_worker.InterpretedWorker"


def use(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """vLLM calls it in each process that has support/interpreted on its path: see entry_points.txt.

    Args:
        put: stands in for `setattr`, where it is to be undone.
    """
    from vllm_redrafter import plugin
    from vllm_redrafter.engine import selection
    from vllm_redrafter.utils import names

    put(names, "CUDA_WORKER", WORKER)
    put(names, "WORKERS", (names.CPU_WORKER, WORKER))
    put(plugin, "engine_here", lambda: replace(selection.cuda_engine(), tree_arguments={}))
