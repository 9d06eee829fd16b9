# SPDX-License-Identifier: Apache-2.0
"""The same prompts decoded by one engine, or by several in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from vllm_redrafter.cli.demo.engine_process import EngineProcess
from vllm_redrafter.cli.demo.engine_worker import Decoded, EngineSettings, Round

MEMORY_SHARE = 0.9
"""Of a GPU, for all engines together."""
COUNTERS = ("sampled_tokens", "verifications")


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
        repeats: timed decodings of all prompts for each level, after one of half the tokens that is
            not timed: first calls compile and allocate, and the batch's budget learns.
        dtype: of the target.
        fewest_prompts: of a level.
        prompts_per_request: of a level, for each request in flight.
    """

    target: str
    speculative_config: dict[str, Any] | None
    prompts: list[list[int]]
    max_tokens: int
    levels: list[int]
    max_model_len: int
    seed: int = 0
    repeats: int = 3
    dtype: str = "float32"
    fewest_prompts: int = 4
    prompts_per_request: int = 3

    @property
    def decodings(self) -> int:
        """Of single prompts, all together."""
        return sum(len(self.prompts_at(level)) for level in self.levels) * (1 + self.repeats)

    def prompts_at(self, in_flight: int) -> list[list[int]]:
        """Enough that the batch is full for most of the time: while it runs empty, it is small.

        Where there are fewer prompts than that, they are asked again.
        """
        num_prompts = max(self.fewest_prompts, self.prompts_per_request * in_flight)
        return list(islice(cycle(self.prompts), num_prompts))

    def engine(self, memory_share: float) -> EngineSettings:
        """What decodes it."""
        return EngineSettings(
            self.target,
            self.speculative_config,
            self.dtype,
            self.max_model_len,
            max_num_seqs=max(self.levels),
            seed=self.seed,
            memory_share=memory_share,
            one_process=not torch.cuda.is_available(),
        )

    def rounds_at(self, in_flight: int) -> list[Round]:
        """What is decoded at a level, one after the other; the first is not timed."""
        prompts = self.prompts_at(in_flight)
        warm_up = Round(prompts, -(-self.max_tokens // 2), in_flight)
        return [warm_up, *[Round(prompts, self.max_tokens, in_flight)] * self.repeats]


@dataclass(frozen=True)
class LevelResult:
    """The prompts of a level decoded with `in_flight` requests at once.

    Attributes:
        in_flight: the level.
        repeats: seconds of each, from the first request to the last token, prefills included.
        answers: per prompt and engine step, the tokens that the step output; the last of a step
            is the target's own, those before it were drafted and accepted.
        stats: the engine's counters, of all repeats; empty without speculation.
    """

    in_flight: int
    repeats: list[float]
    answers: list[list[list[int]]]
    stats: dict[str, float]

    @classmethod
    def of_repeats(cls, in_flight: int, repeats: Sequence[Decoded]) -> LevelResult:
        """The result of several rounds that decoded the same."""
        counted = [name for name in COUNTERS if name in repeats[0].stats]
        return cls(
            in_flight,
            [decoded.seconds for decoded in repeats],
            repeats[-1].answers,
            {name: sum(decoded.stats[name] for decoded in repeats) for name in counted},
        )

    def tokens(self) -> list[list[int]]:
        """Per prompt, the whole answer."""
        return [[token for step in answer for token in step] for answer in self.answers]

    @property
    def seconds(self) -> float:
        """The repeats' median."""
        return median(self.repeats)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens())) / self.seconds

    def speed_up(self, before: LevelResult) -> float:
        """Tokens per second over those of another engine, which took turns with this one.

        The median over the repeats: a machine that is slow for a while is so for both.
        """
        ratio = median(b / a for a, b in zip(self.repeats, before.repeats, strict=True))
        return ratio * sum(map(len, self.tokens())) / sum(map(len, before.tokens()))

    @property
    def tokens_per_target_step(self) -> float:
        """Per request; prefills are not counted on either side."""
        verifications = self.stats.get("verifications", 0)
        return self.stats["sampled_tokens"] / verifications if verifications else 1.0


class Engine(Protocol):
    """What decodes a round: a process with vLLM, or mlx-lm."""

    def decode(self, asked: Round, on_answer: Callable[[], None]) -> Decoded: ...


@contextmanager
def engines(jobs: Sequence[DecodingJob], logs: Sequence[Path]) -> Iterator[list[EngineProcess]]:
    """The engines of some jobs, all started; they end with the block.

    Args:
        jobs: what they will decode.
        logs: take their own output.

    Raises:
        ConfigError: one failed; the message has the end of its log.
    """
    with ExitStack() as stack:
        share = MEMORY_SHARE / len(jobs)
        processes = [
            stack.enter_context(EngineProcess(job.engine(share), log))
            for job, log in zip(jobs, logs, strict=True)
        ]
        # On a GPU one after the other: each looks how much memory is free.
        one_by_one = torch.cuda.is_available()
        for group in [[process] for process in processes] if one_by_one else [processes]:
            for process in group:
                process.start()
            for process in group:
                process.wait_until_ready()
        yield processes


def decode_in_turns(
    processes: Sequence[Engine],
    jobs: Sequence[DecodingJob],
    on_progress: Callable[[int, int], None],
) -> list[list[LevelResult]]:
    """Decode round by round, each round in all engines, so that a machine's drift meets all alike.

    Args:
        processes: started engines.
        jobs: one for each; they have the same levels and repeats.
        on_progress: told which job goes on, and how many of its answers are finished.

    Returns:
        Per job and level.

    Raises:
        ConfigError: an engine failed; the message has the end of its log.
    """
    finished = [0] * len(jobs)

    def decode_all(rounds: Sequence[Round]) -> list[Decoded]:
        decoded = []
        for number, (process, asked) in enumerate(zip(processes, rounds, strict=True)):

            def count(number: int = number) -> None:
                finished[number] += 1
                on_progress(number, finished[number])

            decoded.append(process.decode(asked, count))
        return decoded

    results: list[list[LevelResult]] = [[] for _ in jobs]
    for level in jobs[0].levels:
        rounds = zip(*(job.rounds_at(level) for job in jobs), strict=True)
        _, *timed = map(decode_all, rounds)
        for number, of_one in enumerate(zip(*timed, strict=True)):
            results[number].append(LevelResult.of_repeats(level, of_one))
    return results
