"""Many requests through vLLM's engine without a server, a limited number of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # benchmarks/throughput.py imports this in a process that has no engine
    from vllm import RequestOutput, SamplingParams


class EngineRequest(NamedTuple):
    """What `run_requests` hands to vLLM: a name that comes back with the output, tokens, how."""

    name: str
    prompt: Sequence[int]
    params: SamplingParams


def run_requests(
    engine: Any, next_request: Callable[[], EngineRequest | None], in_flight: int
) -> Iterator[list[RequestOutput]]:
    """Keep up to `in_flight` requests in the engine, and yield what each of its steps puts out.

    Args:
        engine: vLLM's LLMEngine.
        next_request: asked whenever there is room. Where it has none, the engine goes on with
            those that it has; the iterator ends when there are no others either.
        in_flight: the most requests at once.
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
