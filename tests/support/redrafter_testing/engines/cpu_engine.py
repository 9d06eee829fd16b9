"""Starting vLLM in tests. An engine takes half a minute to start: share it where possible."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def engine(target: Path, **arguments: Any) -> Iterator[Any]:
    """An `LLM` in float32 that is gone, processes included, when the body ends."""
    from vllm import LLM

    llm = LLM(
        str(target),
        dtype="float32",
        seed=0,
        disable_log_stats=False,
        **{"max_num_seqs": 16, "block_size": 32, "enforce_eager": True, **arguments},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextmanager
def proposer(path: str) -> Iterator[None]:
    """Engines started in the body draft with the class at `path`, whatever else is as always."""
    from vllm_redrafter import names
    from vllm_redrafter.substitution import substituted

    with substituted(names, "CPU_PROPOSER", path):
        yield
