"""vLLM with Model Runner V2 on the CPU, its Triton kernels and ours under Triton's interpreter.

The interpreter is a matter of the whole process, so the engine's front end lives in one of its
own, which answers calls over a pipe. Most of an engine's start is imports: they are done once, in
a server that forks off each engine's process.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from redrafter_testing.python_path import SUPPORT, python_path

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc with a function
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
    "TORCHDYNAMO_DISABLE": "1",  # its compiler would ask our backend "cpu" of Triton for code
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process instead of three: a third of the start
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers of other engines would share one core
    "PYTHONSAFEPATH": "1",  # else the working directory's triton_kernels would hide vLLM's
    "PYTHONPATH": python_path(SUPPORT / "interpreted", SUPPORT),
}

SETTINGS = {"max_num_seqs": 8, "block_size": 32, "max_model_len": 256, "enforce_eager": True}


class InterpretedEngine:
    """What a test does with an engine; each method is answered by the engine's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, workload: Any) -> list[Any]:
        """vLLM's answers to the workload's requests."""
        return self.call(_run, workload)

    def rpc(self, function: Callable[..., Any] | str, *args: Any) -> Any:
        """What the function returns, called with the worker in the worker's process."""
        return self.call(_rpc, function, *args)

    def counter(self, name: str) -> float:
        """The value of one of vLLM's counters."""
        return self.call(_counter, name)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(llm, *args)` returns in the engine's process."""
        self._connection.send((function, args))
        failed, result = self._connection.recv()
        if failed:
            raise RuntimeError(f"in the engine's process:\n{result}")
        return result


@contextmanager
def interpreted_engine(
    target: Path,
    setup: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
    preloaded: bool = True,
    **arguments: Any,
) -> Iterator[InterpretedEngine]:
    """An engine in float32 that is gone, processes included, when the body ends.

    Args:
        target: the model.
        setup: called in the engine's process before the engine is made.
        environment: variables besides, or instead of, ENVIRONMENT's.
        preloaded: vLLM has been imported before `environment` is set; False for what it reads then.
        arguments: of vllm.LLM, besides, or instead of, SETTINGS.
    """
    context: Any = multiprocessing.get_context("forkserver" if preloaded else "spawn")
    if preloaded:
        context.set_forkserver_preload(["redrafter_testing.engines.interpreted_imports"])
    ours, theirs = context.Pipe()
    variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
    given = (theirs, str(target), setup, variables, arguments)
    process = context.Process(target=_serve, args=given)
    # The server's, which the first process starts, or the process's own.
    with _environment(ENVIRONMENT if preloaded else variables):
        process.start()
    theirs.close()
    try:
        failed, result = ours.recv()
        if failed:
            raise RuntimeError(f"the engine did not start:\n{result}")
        yield InterpretedEngine(ours)
    finally:
        ours.close()
        process.join(timeout=60)
        if process.is_alive():
            process.terminate()
            process.join()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# In the engine's process


def _serve(
    connection: Connection,
    target: str,
    setup: Callable[[], None] | None,
    variables: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    try:
        os.environ.update(variables)
        if setup is not None:
            setup()
        from vllm import LLM

        llm = LLM(
            target,
            dtype="float32",
            seed=0,
            disable_log_stats=False,
            **{**SETTINGS, **arguments},
        )
    except BaseException:
        connection.send((True, traceback.format_exc()))
        return
    llm.collective_rpc(settle_worker)
    connection.send((False, None))
    try:
        while True:
            function, args = connection.recv()
            try:
                connection.send((False, function(llm, *args)))
            except Exception:
                connection.send((True, traceback.format_exc()))
    except EOFError:
        pass
    finally:
        llm.llm_engine.engine_core.shutdown()


def settle_worker(worker: Any) -> None:
    """Replace two kernels of vLLM's, which are not what is tested, by PyTorch.

    One fails under the interpreter ('int' object has no attribute 'to'): top-k and top-p. The
    other, the KV cache's update, is a program per token and layer, and a third of the time.
    """
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
    triton_attn.triton_reshape_and_cache_flash = _write_kv


def _write_kv(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    slots = slot_mapping[slot_mapping >= 0]
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    at = (slots // key_cache.shape[1], slots % key_cache.shape[1])
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        quantised = kv_cache_dtype.startswith("fp8")
        cache[at] = (new[rows] / scale if quantised else new[rows]).to(cache.dtype)


def _run(llm: Any, workload: Any) -> list[Any]:
    return workload.run(llm)


def _rpc(llm: Any, function: Any, *args: Any) -> Any:
    return llm.collective_rpc(function, args=args)


def _counter(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def reset_prefix_cache(llm: Any) -> None:
    """For `InterpretedEngine.call`: the next requests find nothing."""
    assert llm.reset_prefix_cache()


def use_triton_attention() -> None:
    """For `setup`: plain engines get vLLM's Triton attention instead of its CPU attention."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    register_backend(AttentionBackendEnum.CPU_ATTN, backend)


def reasoning_markers(llm: Any) -> tuple[list[int], list[int]]:
    """For `InterpretedEngine.call`: what thinking starts with, and what a budget's end forces."""
    config = llm.llm_engine.vllm_config.reasoning_config
    return config.reasoning_start_token_ids, config.reasoning_end_token_ids


def run_with_aborts(llm: Any, workload: Any, aborted: list[int], after: int) -> dict[int, Any]:
    """For `InterpretedEngine.call`: abort some requests after some steps; the others' answers."""
    engine = llm.llm_engine
    for index, (prompt, params) in enumerate(zip(workload.prompts, workload.params, strict=True)):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    answers, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = output
        steps += 1
        if steps == after:
            engine.abort_request([str(index) for index in aborted])
    return answers
