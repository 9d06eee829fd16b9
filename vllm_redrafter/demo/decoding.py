"""Decoding in vLLM, in a process of its own: `decode` starts it, `main` is what runs there.

One process per engine, so that the second starts as the first did: with all memory free, no
threads left over, and the same environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.errors import ConfigError
from vllm_redrafter.files import tail

FEWEST_PROMPTS, PROMPTS_PER_REQUEST = 8, 4
"""Prompts of a level: at least so many, and so many for each request in flight."""
PROGRESS = "@progress"
"""Begins a line of the worker's output that tells how many answers are finished."""


@dataclass(frozen=True)
class DecodingJob:
    """What to decode, and how.

    Attributes:
        target: the target's folder.
        speculative_config: vLLM's, or None for plain decoding.
        prompts: token ids.
        max_tokens: of an answer.
        levels: how many requests are in flight, each for its share of the prompts (`prompts_at`).
        max_model_len: of the engine; prompt and answer together.
        seed: of the engine.
        repeats: timed decodings of all prompts for each level, after one that is not timed: first
            calls compile and allocate, and the batch's budget learns.
    """

    target: str
    speculative_config: dict[str, Any] | None
    prompts: list[list[int]]
    max_tokens: int
    levels: list[int]
    max_model_len: int
    seed: int = 0
    repeats: int = 3

    @property
    def decodings(self) -> int:
        """Of single prompts, all together."""
        return sum(len(self.prompts_at(level)) for level in self.levels) * (1 + self.repeats)

    def prompts_at(self, in_flight: int) -> list[list[int]]:
        """Enough that the batch is full for most of the time: while it runs empty, it is small."""
        return self.prompts[: max(FEWEST_PROMPTS, PROMPTS_PER_REQUEST * in_flight)]


@dataclass(frozen=True)
class LevelResult:
    """The prompts of a level decoded with `in_flight` requests at once.

    Attributes:
        in_flight: the level.
        seconds: from the first request to the last token, prefills included; the repeats' median.
        answers: per prompt and engine step, the tokens that the step output; the last of a step
            is the target's own, those before it were drafted and accepted.
        stats: the engine's counters, of all repeats; empty without speculation.
    """

    in_flight: int
    seconds: float
    answers: list[list[list[int]]]
    stats: dict[str, float]

    def tokens(self) -> list[list[int]]:
        """Per prompt, the whole answer."""
        return [[token for step in answer for token in step] for answer in self.answers]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens())) / self.seconds

    @property
    def tokens_per_target_step(self) -> float:
        """Per request; prefills are not counted on either side."""
        verifications = self.stats.get("verifications", 0)
        return self.stats["sampled_tokens"] / verifications if verifications else 1.0


# The side that asks


def decode(job: DecodingJob, log: Path, on_progress: Callable[[int], None]) -> list[LevelResult]:
    """Start an engine in a fresh process and decode.

    Args:
        job: what to decode.
        log: takes the engine's own output.
        on_progress: told how many answers are finished, over all levels.

    Raises:
        ConfigError: the engine failed; the message has the end of the log.
    """
    folder = log.parent
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(asdict(job)))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", __name__, str(job_file), str(result_file)]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            env=engine_environment(os.environ),
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(PROGRESS):
                on_progress(int(line.split()[1]))
            else:
                output.write(line)
    if process.returncode != 0 or not result_file.is_file():
        raise ConfigError(f"vLLM failed; the end of {log}:\n{tail(log)}")
    return [LevelResult(**values) for values in json.loads(result_file.read_text())]


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with what a CPU engine is fast with; quiet and offline."""
    return {
        **environment,
        **cpu_variables(environment),
        # Without it a process started from a source folder would import what lies there.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": environment.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }


# The side that runs vLLM


def main(job_file: str, result_file: str) -> None:
    """Decode what `job_file` asks for, and write the results."""
    job = DecodingJob(**json.loads(Path(job_file).read_text()))
    from vllm_redrafter.engine.offline import start_llm

    llm = start_llm(
        job.target,
        speculative_config=job.speculative_config,
        dtype="float32",
        enforce_eager=True,
        # A prompt is decoded once per level: its prefill must cost the same each time.
        enable_prefix_caching=False,
        max_model_len=job.max_model_len,
        max_num_seqs=max(job.levels),
        seed=job.seed,
        disable_log_stats=True,
    )
    results = list(_decode_levels(llm, job))
    Path(result_file).write_text(json.dumps([asdict(result) for result in results]))


def _decode_levels(llm: Any, job: DecodingJob) -> Iterator[LevelResult]:
    from vllm_redrafter.engine.offline import decode_all

    engine, finished = llm.llm_engine, 0

    def count() -> None:
        nonlocal finished
        finished += 1
        print(PROGRESS, finished, flush=True)

    for in_flight in job.levels:
        prompts = job.prompts_at(in_flight)
        decode_all(engine, prompts, job.max_tokens, in_flight, count)
        if job.speculative_config:
            llm.collective_rpc("reset_redrafter_stats")
        seconds = []
        for _ in range(job.repeats):
            started = time.perf_counter()
            answers = decode_all(engine, prompts, job.max_tokens, in_flight, count)
            seconds.append(time.perf_counter() - started)
        stats = llm.collective_rpc("redrafter_stats")[0] if job.speculative_config else {}
        yield LevelResult(in_flight, median(seconds), answers, stats)


if __name__ == "__main__":
    main(*sys.argv[1:])
