"""One answer of vLLM's CPU engine, with a record of its drafts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform

from vllm_redrafter.budget.draft_recorder import DraftRecorder, RecordedStep
from vllm_redrafter.engine.offline import decode_all, start_llm
from vllm_redrafter.utils.errors import ConfigError

WARM_UP_TOKENS = 32


def start_recordable(target: str, speculative_config: dict[str, Any], dtype: str) -> Any:
    """vLLM in this process, for one request at a time.

    Raises:
        ConfigError: this vLLM is not its CPU build, or cannot start.
    """
    if not current_platform.is_cpu():
        raise ConfigError(
            f"trace: this vLLM runs on {current_platform.device_type!r}, where trees stay on the "
            "device and reading them would stall every step; use vLLM's CPU build: "
            "pip install 'vllm-redrafter[cpu]'"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return start_llm(
        target,
        speculative_config=speculative_config,
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=False,  # the prompt is read twice
        max_num_seqs=1,
        seed=0,
        disable_log_stats=True,
        distributed_executor_backend="uni",
    )


def record_answer(
    llm: Any, prompt: Sequence[int], max_tokens: int
) -> tuple[list[int], list[RecordedStep]]:
    """The greedy answer to a prompt, and the steps that made it.

    A part is answered before, without a record: first steps compile, which would be all that the
    times show.
    """
    decode_all(llm.llm_engine, [prompt], min(max_tokens, WARM_UP_TOKENS), 1)
    recorder = DraftRecorder()
    llm.collective_rpc(_attach, args=(recorder,))
    try:
        (steps,) = decode_all(llm.llm_engine, [prompt], max_tokens, 1)
    finally:
        llm.collective_rpc(_attach, args=(None,))
    return [token for step in steps for token in step], recorder.steps


def _attach(worker: Any, recorder: DraftRecorder | None) -> None:
    worker.model_runner.proposer.recorder = recorder
