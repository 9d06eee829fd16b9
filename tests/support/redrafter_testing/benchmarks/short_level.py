# SPDX-License-Identifier: Apache-2.0
"""A level of benchmarks/step_log.py with few tokens, for `Engine.call`."""

import importlib
from typing import Any


def measured(llm: Any, drafts: bool) -> tuple[Any, Any]:
    """The level's record of eight requests, and with `drafts` its counters."""
    step_log: Any = importlib.import_module("step_log")
    step_log.OUTPUT_TOKENS = (4, 8)
    prompts = [[5 + (7 * i + t) % 90 for t in range(6)] for i in range(8)]
    level = {"requests": 2, "temperature": 0.7}
    record = step_log.measured(llm, step_log.StepLog(llm), prompts, level)
    return record, step_log.counted(llm, prompts, level) if drafts else None
