# SPDX-License-Identifier: Apache-2.0
"""The target in vLLM, writing training data."""

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from vllm_redrafter.data.settings import GenerationSettings, SamplingSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.offline.llm import (
    EngineRequest,
    failures_while,
    run_requests,
    start_llm,
    with_further,
)
from vllm_redrafter.utils.processor import advice_on

CPU_BATCHED_TOKENS = 4096
"""Tokens of a step that vLLM takes on a CPU by default."""


def _prefill_arguments(target: str, sampling: SamplingSettings) -> dict[str, Any]:
    """Arguments of vLLM without which its CPU engine may die of a seeded request.

    It winds back the generator of a request whose prompt is read in parts, and CPU generators
    cannot be wound back (`_bookkeeping_sync` in vLLM's gpu_model_runner.py; our own runner keeps
    them out of it). So that no prompt is read in parts, a step has to take the longest.
    """
    if not current_platform.is_cpu() or not sampling.temperature:
        return {}
    longest = sampling.max_model_len
    if longest is None:
        model = EngineArgs(model=os.path.expanduser(target), dtype=sampling.dtype)
        longest = model.create_model_config().max_model_len
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(longest, CPU_BATCHED_TOKENS),
    }


def engine_arguments(target: str, settings: GenerationSettings) -> dict[str, Any]:
    """vLLM's arguments, but for the model; ConfigError where `engine_args` repeats an option."""
    sampling, usual = settings.sampling, {"disable_log_stats": True}
    own = {
        "dtype": sampling.dtype,
        "max_model_len": sampling.max_model_len,
        "max_num_seqs": settings.in_flight,
        "tensor_parallel_size": settings.engine.tensor_parallel_size,
    }
    if "speculative_config" not in settings.engine.further_arguments():
        usual |= _prefill_arguments(target, sampling)
    return with_further(settings.engine, own, usual)


def _sampling_params(turn: OpenTurn, settings: GenerationSettings) -> SamplingParams:
    sampling = settings.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        max_tokens=turn.max_tokens,
        seed=turn.seed,
        stop_token_ids=None if turn.stop_token is None else [turn.stop_token],
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class OfflineEngine:
    """The target in vLLM: a `TargetEngine`; ConfigError where it cannot start."""

    def __init__(self, target: Target, settings: GenerationSettings) -> None:
        self._settings, self.in_flight = settings, settings.in_flight
        arguments = engine_arguments(target.name, settings)
        self._llm = start_llm(target.name, ends_with_this_process=True, **arguments)
        model = self._llm.llm_engine.model_config
        self.max_model_len = int(model.max_model_len)
        # How to make it faster, where vLLM computes on the processor and could be.
        self.advice = advice_on(model.dtype) if current_platform.is_cpu() else None

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        def next_request() -> EngineRequest | None:
            if not waiting:
                return None
            turn = waiting.popleft()
            params = _sampling_params(turn, self._settings)
            return EngineRequest(str(turn.conversation), turn.prompt, params)

        with failures_while("generating"):
            engine = self._llm.llm_engine
            for outputs in run_requests(engine, next_request, self._settings.in_flight):
                for output in outputs:
                    if output.finished:
                        answer = output.outputs[0]
                        ended = answer.finish_reason == "stop"
                        yield TurnAnswer(int(output.request_id), list(answer.token_ids), ended)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
