# SPDX-License-Identifier: Apache-2.0
"""An engine of the demo: vLLM in a process of its own.

The process reads a `Job` as JSON from its standard input, and prints a `Decoded` as JSON for each
round.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import tail

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Round:
    """Prompts (token ids) to decode greedily, `in_flight` of them at once.

    With `candidates`, so many of each prompt's most probable next tokens are told instead.
    """

    prompts: list[list[int]]
    max_tokens: int
    in_flight: int
    candidates: int = 0


@dataclass(frozen=True)
class Job:
    """What an engine decodes, round by round; plainly, if the speculative config is None."""

    target: str
    speculative_config: dict[str, Any] | None
    dtype: str
    rounds: list[Round]


@dataclass(frozen=True)
class Decoded:
    """A round's seconds, prefills included, and per prompt and engine step the tokens it output.

    The last token of a step is the target's own; those before it were drafted and accepted.
    Candidates are pairs of a token and its log-probability, per prompt.
    """

    seconds: float
    answers: list[list[list[int]]]
    candidates: list[list[tuple[int, float]]] = field(default_factory=list)


def decode_in_vllm(folder: Path, job: Job) -> Iterator[Decoded]:
    """Decode a job's rounds.

    ConfigError: vLLM failed; the message has the end of its log, which is in `folder`.
    """
    log = folder / f"vllm-{'with' if job.speculative_config else 'without'}-redrafter.log"
    environment = {
        **os.environ,
        **cpu_variables(os.environ),
        "TOKENIZERS_PARALLELISM": "false",
        # Without more processes, vLLM leaves no core to its scheduler.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (
        log.open("a" if job.rounds[0].candidates else "w") as output,
        subprocess.Popen(
            # -P: what lies in the current folder is not imported.
            [sys.executable, "-P", "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asdict(job)))
                process.stdin.close()
            for _ in job.rounds:
                if not (line := process.stdout.readline()):
                    raise ConfigError(f"vLLM failed; the end of {log}:\n{tail(log)}")
                yield Decoded(**json.loads(line))
        finally:
            process.kill()


def _main() -> None:
    values = json.load(sys.stdin)
    job = Job(**{**values, "rounds": [Round(**each) for each in values["rounds"]]})
    # Results alone go to standard output: what others print goes where errors go.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm_redrafter.offline.llm import decode_all, next_tokens, start_llm

    llm = start_llm(
        job.target,
        speculative_config=job.speculative_config,
        dtype=job.dtype,
        enforce_eager=True,
        # A prompt is decoded several times: its prefill must cost the same each time.
        enable_prefix_caching=False,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(each.in_flight for each in job.rounds),
        seed=0,
        disable_log_stats=True,
        distributed_executor_backend="uni",
    )
    for each in job.rounds:
        started = time.perf_counter()
        if each.candidates:
            decoded = Decoded(0.0, [], next_tokens(llm, each.prompts, each.candidates))
        else:
            answers = decode_all(llm.llm_engine, each.prompts, each.max_tokens, each.in_flight)
            decoded = Decoded(time.perf_counter() - started, answers)
        print(json.dumps(asdict(decoded)), file=output)


if __name__ == "__main__":
    _main()
