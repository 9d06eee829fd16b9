# SPDX-License-Identifier: Apache-2.0
"""What runs in an engine's process: vLLM, which decodes whenever it is told to.

`engine_process.py` starts it with an `EngineSettings`, as JSON. It imports vLLM and waits for a
line on its standard input, upon which the engine starts; each further line is a `Round`, as JSON.
On standard output it says, a line each: `ready` when the engine has started, `answer` for each
answer that is finished, and `decoded`, followed by a `Decoded` as JSON, at the end of a round. It
ends where its input does, or at SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

READY, ANSWER, DECODED = "ready", "answer", "decoded"


@dataclass(frozen=True)
class EngineSettings:
    """An engine.

    Attributes:
        target: the target's folder.
        speculative_config: vLLM's, or None for plain decoding.
        dtype: of the target.
        max_model_len: prompt and answer together.
        max_num_seqs: the most requests at once.
        seed: of what is drawn at random.
        memory_share: of a GPU, for this engine.
        one_process: the engine has no processes of its own. On a CPU that spares two imports of
            vLLM, and the core that its workers leave to the scheduler (`reserve_cpu_num` in
            vLLM's utils/ompmultiprocessing.py): half of the machine where there are two.
    """

    target: str
    speculative_config: dict[str, Any] | None
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int
    memory_share: float
    one_process: bool = False


@dataclass(frozen=True)
class Round:
    """What is decoded, once and greedily.

    Attributes:
        prompts: token ids.
        max_tokens: of an answer.
        in_flight: requests at once.
    """

    prompts: list[list[int]]
    max_tokens: int
    in_flight: int


@dataclass(frozen=True)
class Decoded:
    """A round, decoded.

    Attributes:
        seconds: from the first request to the last token, prefills included.
        answers: per prompt and engine step, the tokens that the step output.
        stats: ReDrafter's counters; empty without it.
    """

    seconds: float
    answers: list[list[list[int]]]
    stats: dict[str, float]


def main(settings_json: str) -> None:
    """See the module."""
    # An exception, so that vLLM takes its other processes and shared memory along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    say = _own_output()
    settings = EngineSettings(**json.loads(settings_json))
    executor = None
    if settings.one_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"], executor = "0", "uni"
    from vllm_redrafter.offline.llm import start_llm

    if not sys.stdin.readline():
        return
    llm = start_llm(
        settings.target,
        speculative_config=settings.speculative_config,
        dtype=settings.dtype,
        enforce_eager=True,
        # A prompt is decoded several times: its prefill must cost the same each time.
        enable_prefix_caching=False,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.memory_share,
        seed=settings.seed,
        disable_log_stats=True,
        distributed_executor_backend=executor,
    )
    say(READY)
    for line in sys.stdin:
        decoded = _decode(llm, settings, Round(**json.loads(line)), lambda: say(ANSWER))
        say(f"{DECODED} {json.dumps(asdict(decoded))}")
    llm.llm_engine.engine_core.shutdown()


def _own_output() -> Callable[[str], None]:
    """Standard output, for this module alone: what others print goes where errors go."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    # vLLM's processes would keep it open when this one is killed, and nobody would notice.
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))
    return lambda line: _write_all(descriptor, f"{line}\n".encode())


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _decode(
    llm: Any, settings: EngineSettings, asked: Round, on_finished: Callable[[], None]
) -> Decoded:
    from vllm_redrafter.offline.llm import decode_all

    has_stats = settings.speculative_config is not None
    if has_stats:
        llm.collective_rpc("reset_redrafter_stats")
    started = time.perf_counter()
    answers = decode_all(
        llm.llm_engine, asked.prompts, asked.max_tokens, asked.in_flight, on_finished
    )
    seconds = time.perf_counter() - started
    stats = llm.collective_rpc("redrafter_stats")[-1] if has_stats else {}
    return Decoded(seconds, answers, stats)


if __name__ == "__main__":
    main(*sys.argv[1:])
