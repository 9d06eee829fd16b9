# SPDX-License-Identifier: Apache-2.0
"""vLLM without a server: starting it, and many requests, a limited number of them at a time."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import psutil
from vllm import LLM, RequestOutput, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_redrafter.data.settings import EngineSettings
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.files import check_no_pattern

CPU_MEMORY_SHARE, CPU_MOST_MEMORY = 0.8, 0.92
"""Of a CPU's memory: the share of what is free that engines take, and the most of all."""


@contextmanager
def start_of(target: str) -> Iterator[None]:
    """Make a ConfigError of what vLLM raises in the body, where it cannot start with the target."""
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


def start_llm(target: str, ends_with_this_process: bool = False, **arguments: Any) -> LLM:
    """vLLM with the target, a folder or a hub id; ConfigError where it cannot start."""
    core = _core_in_this_process() if ends_with_this_process else nullcontext()
    with start_of(target), core:
        return LLM(model=os.path.expanduser(target), **arguments)


@contextmanager
def failures_while(doing: str) -> Iterator[None]:
    """Make a ConfigError of what a running vLLM raises in the body; the command can go on later."""
    try:
        yield
    except (EngineDeadError, RuntimeError) as error:  # of another process, of this one
        raise ConfigError(
            f"vLLM failed while {doing}: {error}. Finished shards are kept: start the same "
            "command again to continue"
        ) from error


@contextmanager
def _core_in_this_process() -> Iterator[None]:
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


def with_further(
    engine: EngineSettings, own: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments of vLLM: a command's `own`, and those of `--engine-args`, before the `usual`.

    ConfigError: `--engine-args` repeats an own one.
    """
    further = engine.further_arguments()
    if twice := sorted(further.keys() & {"model", *own}):
        raise ConfigError(
            f"--engine-args: {', '.join(twice)}: the command decides about that, or has an "
            "argument or option for it (--in-flight for max_num_seqs)"
        )
    return {**_worker_arguments(engine.tensor_parallel_size), **usual, **own, **further}


def _worker_arguments(workers: int) -> dict[str, Any]:
    """Arguments with which so many workers are processes; on a CPU they take what memory is free.

    Else a CPU engine asks for 0.92 of all, and does not start beside programs that have more than
    the rest. VLLM_CPU_KVCACHE_SPACE and `--engine-args` go before.
    """
    # A worker binds threads and memory of the process that it is in.
    apart = {"distributed_executor_backend": "mp"}
    if not current_platform.is_cpu():
        return apart
    free = psutil.virtual_memory().available / current_platform.get_device_total_memory()
    share = min(CPU_MEMORY_SHARE * free, CPU_MOST_MEMORY) / workers
    return {**apart, "gpu_memory_utilization": share}


class EngineRequest(NamedTuple):
    """What `run_requests` hands to vLLM: a name that comes back with the output, tokens, how."""

    name: str
    prompt: Sequence[int]
    params: SamplingParams


def run_requests(
    engine: Any, next_request: Callable[[], EngineRequest | None], in_flight: int
) -> Iterator[list[RequestOutput]]:
    """Keep up to `in_flight` requests in vLLM's LLMEngine, and yield what each step puts out.

    `next_request` is asked whenever there is room. Where it has none, the engine goes on with
    those that it has; the iterator ends when there are no others either.
    """
    running = 0
    while True:
        while running < in_flight and (request := next_request()) is not None:
            prompt = {"prompt_token_ids": list(request.prompt)}
            engine.add_request(request.name, prompt, request.params)
            running += 1
        if not running:
            return
        outputs = engine.step()
        running -= sum(output.finished for output in outputs)
        yield outputs


def decode_all(
    engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int, in_flight: int, **sampling: Any
) -> list[list[list[int]]]:
    """Decode prompts, greedily unless told, `in_flight` at a time: by prompt and step, tokens."""
    params = SamplingParams(
        **{"temperature": 0.0, **sampling},
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
    return steps


def next_tokens(
    llm: LLM, prompts: Sequence[list[int]], number: int
) -> list[list[tuple[int, float]]]:
    """Per prompt, so many of the most probable next tokens, with their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=number, detokenize=False)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs: Any = llm.generate(asked, params, use_tqdm=False)
    first = (output.outputs[0].logprobs[0] for output in outputs)
    return [[(token, found.logprob) for token, found in each.items()] for each in first]
