# SPDX-License-Identifier: Apache-2.0
"""Lets the plugin choose the CUDA engine on a CPU, with `InterpretedWorker`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

WORKER = "redrafter_testing.gpu.interpreted_worker.InterpretedWorker"


def use(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Each process with support/interpreted on its path calls it; `put` may undo what it sets."""
    from vllm_redrafter import plugin
    from vllm_redrafter.engine import selection
    from vllm_redrafter.utils import names

    put(names, "V2_WORKER", WORKER)
    put(names, "WORKERS", (names.CPU_WORKER, WORKER))
    put(plugin, "engine_here", lambda: replace(selection.v2_engine(), tree_arguments={}))
