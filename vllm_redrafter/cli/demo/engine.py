# SPDX-License-Identifier: Apache-2.0
"""An engine of the demo: vLLM in a process of its own, which waits between rounds.

Its argument is the engine's arguments, as JSON. It reads a `Round` per line of standard input, and
prints a `Decoded`; both are JSON. It ends where standard input ends.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from vllm_redrafter.drafting.recorder import RecordedStep
from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import tail

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Round:
    """Prompts (token ids) to decode greedily, `in_flight` of them at once.

    With `candidates`, so many of each prompt's most probable next tokens are told instead. If it
    `is_recorded`, a CPU engine decodes one prompt at a time, and tells what was found in the text.
    """

    prompts: list[list[int]]
    max_tokens: int
    in_flight: int
    candidates: int = 0
    is_recorded: bool = False


@dataclass(frozen=True)
class Decoded:
    """A round's seconds, prefills included, and per prompt and engine step the tokens it output.

    Candidates are pairs of a token and its log-probability, per prompt. Sources are, per prompt
    and token: "target", its own; "drafter", drafted and accepted; or, if it was recorded, "match",
    the same of a token that a match in the text had, too.
    """

    seconds: float
    answers: list[list[list[int]]]
    candidates: list[list[tuple[int, float]]] = field(default_factory=list)
    sources: list[list[str]] = field(default_factory=list)


@contextmanager
def vllm_process(
    folder: Path, speculative_config: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Callable[[Round], Decoded]]:
    """What decodes rounds until the body ends, in vLLM by its arguments; its log is in `folder`.

    ConfigError, at a round: vLLM failed; the message has the end of the log.
    """
    log = folder / f"vllm-{'with' if speculative_config else 'without'}-redrafter.log"
    environment = {
        **os.environ,
        **cpu_variables(os.environ),
        "TOKENIZERS_PARALLELISM": "false",
        # Without more processes, vLLM leaves no core to its scheduler.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    arguments |= {
        "speculative_config": speculative_config,
        "enforce_eager": True,
        # A prompt is decoded several times: its prefill must cost the same each time.
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.45,  # of a GPU, which two share; see `cpu_variables` for a CPU
        "max_model_len": MAX_MODEL_LEN,
        "seed": 0,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            # -P: what lies in the current folder is not imported.
            [sys.executable, "-P", "-m", __name__, json.dumps(arguments)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as process,
    ):
        asked, told = process.stdin, process.stdout
        assert asked is not None and told is not None

        def decode(batch: Round) -> Decoded:
            with suppress(BrokenPipeError):
                print(json.dumps(asdict(batch)), file=asked, flush=True)
            if not (line := told.readline()):
                raise ConfigError(f"vLLM failed; the end of {log}:\n{tail(log)}")
            return Decoded(**json.loads(line))

        try:
            yield decode
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                asked.close()


def _main() -> None:
    # Results alone go to standard output: what others print goes where errors go.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm_redrafter.engine.cpu.recording import record_answer
    from vllm_redrafter.offline.llm import decode_all, next_tokens, start_llm

    llm: Any = None
    for line in sys.stdin:
        # vLLM starts at the first round, when no other engine works.
        llm = llm or start_llm(**json.loads(sys.argv[1]))
        on_cpu = llm.llm_engine.vllm_config.device_config.device_type == "cpu"
        batch, started = Round(**json.loads(line)), time.perf_counter()
        if batch.candidates:
            decoded = Decoded(0.0, [], next_tokens(llm, batch.prompts, batch.candidates))
        elif batch.is_recorded and on_cpu:
            recorded = [record_answer(llm, prompt, batch.max_tokens) for prompt in batch.prompts]
            sources = [[*chain(*map(sources_of, *each))] for each in recorded]
            decoded = Decoded(0.0, [answer for answer, _ in recorded], sources=sources)
        else:
            answers = decode_all(llm.llm_engine, batch.prompts, batch.max_tokens, batch.in_flight)
            seconds = time.perf_counter() - started
            sources = [[*chain(*map(sources_of, steps))] for steps in answers]
            decoded = Decoded(seconds, answers, sources=sources)
        print(json.dumps(asdict(decoded)), file=output)


def sources_of(tokens: list[int], step: RecordedStep | None = None) -> list[str]:
    """Of what vLLM returned of a step; of its last one, perhaps less than the step put out."""
    own = len(step.output_tokens if step else tokens) - 1
    found = {n.depth - 1 for n in (step.nodes if step else ()) if n.accepted and n.match_length}
    places = range(len(tokens))
    return ["match" if i in found else "drafter" if i < own else "target" for i in places]


if __name__ == "__main__":
    _main()
