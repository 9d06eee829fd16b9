# SPDX-License-Identifier: Apache-2.0
"""vLLM in a process of its own, which answers calls over a pipe.

It is forked off a server that has imported vLLM: a second instead of 25.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from redrafter_testing.requests.answers import single_tokens_of

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process instead of three
    "PYTHONSAFEPATH": "1",  # else the working directory's triton_kernels would hide vLLM's
}

SETTINGS = {
    "dtype": "float32",
    "seed": 0,
    "disable_log_stats": False,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,  # it is filled with zeros
}
"""Beside them, a target without a tokenizer is given token ids and gives such."""


Setup = Callable[[], object] | Sequence[Callable[[], object]] | None
"""What is called in an engine's process before the engine is made: a function, or several."""


def setups_in(setup: Setup) -> Sequence[Callable[[], object]]:
    return [setup] if callable(setup) else setup or ()


class ForkServer:
    """Forks off processes that have imported `imported_by_engines` already.

    multiprocessing has one per process; tests need two: Triton's interpreter is chosen on import.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._server = multiprocessing.forkserver.ForkServer()
        self._server.set_forkserver_preload(["redrafter_testing.engines.imported_by_engines"])

    def start(self, function: Callable[..., None], args: tuple[Any, ...]) -> Any:
        """The process that calls `function(*args)`; the first call waits for the import."""
        process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
        connect = self._server.connect_to_new_process
        with (
            patch.object(multiprocessing.forkserver, "connect_to_new_process", connect),
            patch.dict(os.environ, self._environment),
        ):
            process.start()
        return process


class Engine:
    """What a test does with an engine; each method is answered by the engine's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, workload: Any) -> list[Any]:
        """vLLM's answers to the workload's requests."""
        return self.call(_run, workload)

    def tokens(self, workload: Any) -> list[list[int]]:
        """The token ids of each request's only answer."""
        return single_tokens_of(self.run(workload))

    def rpc(self, function: Callable[..., Any] | str, *args: Any) -> Any:
        """What the function returns, called with the worker in the worker's process."""
        return self.call(_rpc, function, *args)

    def counter(self, name: str) -> float:
        """The value of one of vLLM's counters."""
        return self.call(_counter, name)

    def accepted(self) -> float:
        """How many draft tokens vLLM counts as accepted so far."""
        return self.counter("vllm:spec_decode_num_accepted_tokens")

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(llm, *args)` returns in the engine's process."""
        self._connection.send((function, args))
        failed, result = self._connection.recv()
        if failed:
            raise RuntimeError(f"in the engine's process:\n{result}")
        return result


@contextmanager
def forked_engine(
    target: Path,
    server: ForkServer,
    environment: Mapping[str, str],
    setups: Sequence[Callable[[], object]],
    settle: Callable[[Any], None] | None,
    arguments: Mapping[str, Any],
) -> Iterator[Engine]:
    """`setups` are called before the engine is made, `settle` with its worker after."""
    ours, theirs = multiprocessing.Pipe()
    given = (theirs, str(target), setups, settle, {**os.environ, **environment}, dict(arguments))
    process = server.start(_serve, given)
    theirs.close()
    try:
        failed, result = ours.recv()
        if failed:
            raise RuntimeError(f"the engine did not start:\n{result}")
        yield Engine(ours)
    finally:
        ours.close()
        process.join(timeout=60)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(
    connection: Connection,
    target: str,
    setups: Sequence[Callable[[], object]],
    settle: Callable[[Any], None] | None,
    variables: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    try:
        os.environ.update(variables)
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # of whole GB
        for setup in setups:
            setup()
        from vllm import LLM

        _let_vision_targets_load()
        has_words = (Path(target) / "tokenizer_config.json").exists()
        llm = LLM(target, **{**SETTINGS, "skip_tokenizer_init": not has_words, **arguments})
        if settle is not None:
            llm.collective_rpc(settle)
    except BaseException:
        connection.send((True, traceback.format_exc()))
        return
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
        with patch.object(gc, "collect"):  # a second, and the process ends anyway
            llm.llm_engine.engine_core.shutdown()


def _let_vision_targets_load() -> None:
    """Where torchvision is missing: empty modules in place of those that vLLM imports."""
    if find_spec("torchvision") is not None:
        return
    from transformers import processing_utils
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from vllm.model_executor.models import registry

    parts = "torchvision", "transforms", "v2", "functional"
    *packages, functional = (ModuleType(".".join(parts[: n + 1])) for n in range(len(parts)))
    sys.modules.update({module.__name__: module for module in (*packages, functional)})
    functional.InterpolationMode = object  # named in annotations
    packages[-1].functional = functional

    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_processing_utils import VideoProcessorMixin

    # A processor cannot be made without one for videos.
    processing_utils.transformers_module.VideoProcessorMixin = VideoProcessorMixin
    AutoVideoProcessor.from_pretrained = lambda *_, **__: Qwen2VLVideoProcessor()
    # The class is looked at in a process of its own, which would lack these modules.
    registry._run_in_subprocess = lambda look: look()


def _run(llm: Any, workload: Any) -> list[Any]:
    return workload.run(llm)


def _rpc(llm: Any, function: Any, *args: Any) -> Any:
    return llm.collective_rpc(function, args=args)


def _counter(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def reset_prefix_cache(llm: Any) -> None:
    """For `Engine.call`: the next requests find nothing."""
    assert llm.reset_prefix_cache()


def _with_requests(llm: Any, workload: Any, prefix: str = "") -> Any:
    for index, (prompt, params) in enumerate(zip(workload.prompts, workload.params, strict=True)):
        llm.llm_engine.add_request(f"{prefix}{index}", {"prompt_token_ids": prompt}, params)
    return llm.llm_engine


def answers_in_steps(llm: Any, workload: Any) -> list[list[list[int]]]:
    """For `Engine.call`: of each request, the tokens that each step put out."""
    engine = _with_requests(llm, workload)
    steps: list[list[list[int]]] = [[] for _ in workload.prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            of_request = steps[int(output.request_id)]
            of_request.append(list(output.outputs[0].token_ids[sum(map(len, of_request)) :]))
    return steps


def answers_by_priority(llm: Any, workload: Any) -> list[Any]:
    """For `Engine.call`: vLLM's answers, where later requests go before."""
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    priority = list(range(len(prompts), 0, -1))
    return llm.generate(prompts, workload.params, priority=priority, use_tqdm=False)


def run_with_aborts(llm: Any, workload: Any, aborted: list[int], after: int) -> dict[int, Any]:
    """For `Engine.call`: abort some requests after some steps; the others' answers."""
    engine = _with_requests(llm, workload)
    answers, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = output
        steps += 1
        if steps == after:
            engine.abort_request([str(index) for index in aborted])
    return answers


def answers_between_swaps(
    llm: Any, workload: Any, drafters: Sequence[str | None]
) -> tuple[list[list[int]], list[float]]:
    """For `Engine.call`: swap to each of these drafters in turn, some steps apart.

    Returns:
        The answers, and each drafter's tokens per verification; that of None is in use.
    """
    engine = _with_requests(llm, workload)
    answers: dict[str, list[int]] = {}

    def step(times: int = 1) -> None:
        for output in (output for _ in range(times) for output in engine.step()):
            answers[output.request_id] = list(output.outputs[0].token_ids)

    found = []
    for drafter in drafters:
        if drafter is not None:
            assert llm.collective_rpc("redrafter_swap", args=(drafter,)) == [{"drafter": drafter}]
        step(2)  # trees of the one before, and those that are counted late
        llm.collective_rpc("reset_redrafter_stats")
        step(3)
        (stats,) = llm.collective_rpc("redrafter_stats")
        found.append(stats["sampled_tokens"] / stats["verifications"])
    assert engine.has_unfinished_requests(), "the last swaps were without load"
    while engine.has_unfinished_requests():
        step()
    return [answers[str(index)] for index in range(len(answers))], found


def answers_in_sessions(
    llm: Any, sessions: Any, pieces: int, beside: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """For `Engine.call`: answers to sessions whose input comes in pieces, and to requests beside.

    Each piece is the prompt again. The first session's are sent at once, another's one by one.
    """
    engine = llm.llm_engine
    answers: dict[str, list[int]] = {}
    sent = [0] * len(sessions.prompts)

    def send(session: int) -> None:
        name, params = f"session {session}", sessions.params[session]
        request = engine.input_processor.process_inputs(
            name,
            {"prompt_token_ids": list(sessions.prompts[session])},
            params,
            engine.get_supported_tasks(),
            resumable=sent[session] < pieces,
        )
        request.external_req_id = name
        engine.output_processor.add_request(request, None, None, 0)
        # Both extend its prompt; usually the core is in another process.
        engine.engine_core.add_request(deepcopy(request))
        sent[session] += 1

    _with_requests(llm, beside, "beside ")
    for session in range(len(sent)):
        for _ in range(1 if session else pieces + 1):
            send(session)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        for session, params in enumerate(sessions.params):
            due = sent[session] * params.max_tokens
            if sent[session] <= pieces and len(answers.get(f"session {session}", ())) == due:
                send(session)
    return tuple(
        [answers[f"{kind} {index}"] for index in range(len(asked.prompts))]
        for kind, asked in (("session", sessions), ("beside", beside))
    )
