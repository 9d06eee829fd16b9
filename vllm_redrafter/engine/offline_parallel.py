"""Several copies of the target without a server: vLLM's data parallelism, which its LLM refuses."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterator

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.reader import get_metrics_snapshot

from vllm_redrafter.data.generation_settings import GenerationSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.engine.offline import (
    advice_here,
    engine_arguments,
    sampling_params,
    start_of,
    turn_answer,
)
from vllm_redrafter.utils.errors import ConfigError


class DataParallelEngine:
    """The target on `data_parallel_size` engines, writing training data: a `TargetEngine`.

    Args:
        target: a folder, or a hub id.
        settings: how to generate; `in_flight` is for each engine.

    Raises:
        ConfigError: vLLM cannot start with them.
    """

    def __init__(self, target: str, settings: GenerationSettings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[TurnAnswer]] = set()
        arguments = engine_arguments(target, settings)
        try:
            with start_of(target):
                self._llm: AsyncLLM = self._loop.run_until_complete(_start(target, arguments))
        except ConfigError:
            self._loop.close()
            raise

    @property
    def max_model_len(self) -> int:
        return int(self._llm.model_config.max_model_len)

    @property
    def advice(self) -> str | None:
        """See `OfflineEngine`."""
        return advice_here(self._llm.model_config.dtype)

    @property
    def in_flight(self) -> int:
        return self._settings.in_flight * self._settings.engine.data_parallel_size

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        """See `TargetEngine`.

        Raises:
            ConfigError: an engine died.
        """
        while waiting or self._tasks:
            while waiting:
                self._tasks.add(self._loop.create_task(self._answer(waiting.popleft())))
            first = asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            done, self._tasks = self._loop.run_until_complete(first)
            for task in done:
                try:
                    answer = task.result()
                except (EngineDeadError, RuntimeError) as error:
                    raise ConfigError(
                        f"vLLM failed while generating: {error}. Finished shards are kept: start "
                        "the same command again to continue"
                    ) from error
                yield answer

    async def _answer(self, turn: OpenTurn) -> TurnAnswer:
        prompt = {"prompt_token_ids": turn.prompt}
        params = sampling_params(turn, self._settings)
        async for output in self._llm.generate(prompt, params, str(turn.conversation)):
            last = output
        return turn_answer(turn.conversation, last, self._settings.top_logprobs)

    def tokens_per_step(self) -> float | None:
        """See `TargetEngine`; from the counters of all engines."""
        if self._settings.drafter is None:
            return None
        drafts = _sum("vllm:spec_decode_num_drafts")
        return 1 + _sum("vllm:spec_decode_num_accepted_tokens") / drafts if drafts else None

    def close(self) -> None:
        """See `TargetEngine`."""
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._llm.shutdown()


async def _start(target: str, arguments: dict[str, object]) -> AsyncLLM:
    """In the loop that it answers in."""
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=os.path.expanduser(target), **arguments))


def _sum(name: str) -> float:
    """Of a counter, over all engines."""
    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == name)
