"""vLLM without a server: starting it, decoding many prompts, writing training data."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_redrafter.data.generation_settings import GenerationSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.engine.request_loop import EngineRequest, run_requests
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.files import check_no_pattern
from vllm_redrafter.utils.processor import advice_on

CPU_BATCHED_TOKENS = 4096
"""Tokens of a step that vLLM takes on a CPU where it is not told another number."""
CPU_MEMORY_SHARE, CPU_MOST_MEMORY = 0.8, 0.92
"""Of a CPU's memory: what engines take of what is free, and vLLM's own share of all, at most."""


@contextmanager
def start_of(target: str) -> Iterator[None]:
    """What vLLM raises in the body, where it is to start with the target, as an error of ours.

    Raises:
        ConfigError: vLLM refuses its arguments, or cannot start with them.
    """
    check_no_pattern(target)
    try:
        yield
    except Exception as error:
        # A worker's process that cannot start becomes a bare Exception (`wait_for_ready` in vLLM's
        # multiproc_executor.py), with the reason in the log above it; all else is a bug.
        if type(error) is not Exception and not isinstance(
            error, ValueError | RuntimeError | OSError
        ):
            raise
        raise ConfigError(f"vLLM cannot start with target {target!r}: {one_line(error)}") from error


def start_llm(target: str, **arguments: Any) -> LLM:
    """vLLM with the target, a folder or a hub id.

    Raises:
        ConfigError: vLLM refuses the arguments, or cannot start with them.
    """
    with start_of(target):
        return LLM(model=os.path.expanduser(target), **arguments)


def decode_all(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    in_flight: int,
    on_finished: Callable[[], None] = lambda: None,
) -> list[list[list[int]]]:
    """Decode all prompts greedily, `in_flight` at a time, keeping what each step output.

    Args:
        engine: vLLM's LLMEngine.
        prompts: token ids.
        max_tokens: of an answer.
        in_flight: how many requests the engine holds at once.
        on_finished: called for each finished answer.

    Returns:
        Per prompt and step, the step's tokens.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    requests = (EngineRequest(str(index), prompt, params) for index, prompt in enumerate(prompts))
    steps: list[list[list[int]]] = [[] for _ in prompts]
    for outputs in run_requests(engine, lambda: next(requests, None), in_flight):
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            if tokens:
                steps[int(output.request_id)].append(tokens)
            if output.finished:
                on_finished()
    return steps


@contextmanager
def core_in_this_process() -> Iterator[None]:
    """Engines that are started in the body have their core in this process.

    A core in a process of its own does not notice when this one is killed: it and its worker
    would keep the memory that the next run needs. A worker of this process does notice
    (`death_pipe` in vLLM's multiproc_executor.py).
    """
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if name in os.environ:  # the user's own decision
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


def memory_arguments(workers: int) -> dict[str, Any]:
    """Arguments of vLLM with which an engine on a CPU takes of the memory what is free.

    Else it asks for 0.92 of all, and does not start beside programs that have more than the rest.
    VLLM_CPU_KVCACHE_SPACE and `--engine-args` go before.

    Args:
        workers: how many share the memory.
    """
    if not current_platform.is_cpu():
        return {}
    free = psutil.virtual_memory().available / current_platform.get_device_total_memory()
    share = min(CPU_MEMORY_SHARE * free, CPU_MOST_MEMORY) / workers
    return {"gpu_memory_utilization": share}


def _prefill_arguments(target: str, settings: GenerationSettings) -> dict[str, Any]:
    """Arguments of vLLM without which a CPU engine may die of a seeded request.

    It winds back the generator of a request whose prompt is read in parts, and CPU generators
    cannot be wound back (`_bookkeeping_sync` in vLLM's gpu_model_runner.py; our own runner keeps
    them out of it). So that no prompt is read in parts, a step has to take the longest.
    """
    sampling = settings.sampling
    if not current_platform.is_cpu() or not sampling.temperature or settings.drafter is not None:
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
    """Arguments of vLLM, but for the model.

    Raises:
        ConfigError: `engine_args` says what options of the command say.
    """
    sampling, drafter = settings.sampling, settings.drafter
    speculation = None
    if drafter is not None:
        speculation = {"model": drafter, "num_speculative_tokens": settings.spec_tokens}
    of_options = {
        "dtype": sampling.dtype,
        "max_model_len": sampling.max_model_len,
        "max_num_seqs": settings.in_flight,
        "speculative_config": speculation,
        "enforce_eager": settings.engine.enforce_eager,
        "tensor_parallel_size": settings.engine.tensor_parallel_size,
    }
    further = settings.engine.further_arguments()
    if twice := sorted(further.keys() & {"model", *of_options}):
        raise ConfigError(
            f"--engine-args: {', '.join(twice)}: the command has an argument or option for it "
            "(--in-flight for max_num_seqs, --drafter for speculative_config)"
        )
    return {
        **of_options,
        # Not in this process: a worker binds threads and memory of the one it is in.
        "distributed_executor_backend": "mp",
        "disable_log_stats": drafter is None,
        **memory_arguments(settings.engine.tensor_parallel_size),
        **_prefill_arguments(target, settings),
        **further,
    }


def sampling_params(turn: OpenTurn, settings: GenerationSettings) -> SamplingParams:
    """How vLLM draws an answer."""
    sampling = settings.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        max_tokens=turn.max_tokens,
        seed=turn.seed,
        stop_token_ids=None if turn.stop_token is None else [turn.stop_token],
        stop=turn.stop_text,
        # vLLM looks for text in what it decodes.
        detokenize=turn.stop_text is not None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def turn_answer(conversation: int, output: RequestOutput) -> TurnAnswer:
    """What vLLM wrote, as `TargetEngine` gives it."""
    written = output.outputs[0]
    return TurnAnswer(
        conversation=conversation,
        tokens=list(written.token_ids),
        ended=written.finish_reason == "stop",
    )


def advice_here(dtype: torch.dtype) -> str | None:
    """`advice_on`, where vLLM computes on the processor."""
    return advice_on(dtype) if current_platform.is_cpu() else None


class OfflineEngine:
    """The target in vLLM, writing training data: a `TargetEngine`.

    Args:
        target: a folder, or a hub id.
        settings: how to generate.

    Raises:
        ConfigError: vLLM cannot start with them.
    """

    def __init__(self, target: str, settings: GenerationSettings) -> None:
        self._settings = settings
        arguments = engine_arguments(target, settings)
        with core_in_this_process():
            self._llm = start_llm(target, **arguments)

    @property
    def max_model_len(self) -> int:
        return int(self._llm.llm_engine.model_config.max_model_len)

    @property
    def advice(self) -> str | None:
        """What to tell whoever waits for it."""
        return advice_here(self._llm.llm_engine.model_config.dtype)

    @property
    def in_flight(self) -> int:
        return self._settings.in_flight

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        """See `TargetEngine`.

        Raises:
            ConfigError: the engine died.
        """

        def next_request() -> EngineRequest | None:
            if not waiting:
                return None
            turn = waiting.popleft()
            return EngineRequest(
                str(turn.conversation), turn.prompt, sampling_params(turn, self._settings)
            )

        try:
            steps = run_requests(self._llm.llm_engine, next_request, self._settings.in_flight)
            for outputs in steps:
                for output in outputs:
                    if output.finished:
                        conversation = int(output.request_id)
                        yield turn_answer(conversation, output)
        except (EngineDeadError, RuntimeError) as error:  # of another process, of this one
            raise ConfigError(
                f"vLLM failed while generating: {error}. Finished shards are kept: start the same "
                "command again to continue"
            ) from error

    def tokens_per_step(self) -> float | None:
        """See `TargetEngine`; from vLLM's own counters."""
        if self._settings.drafter is None:
            return None
        counters = {metric.name: metric for metric in self._llm.get_metrics()}
        drafts = counters["vllm:spec_decode_num_drafts"].value
        accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
        return 1 + accepted / drafts if drafts else None

    def close(self) -> None:
        """See `TargetEngine`."""
        self._llm.llm_engine.engine_core.shutdown()
