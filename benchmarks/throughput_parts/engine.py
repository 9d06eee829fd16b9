# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, which measures whenever it is told to.

`process.py` starts it as `python -P engine.py JOB RESULTS`: JOB is a `Job` as JSON, and RESULTS a
file that comes into being once the engine has started. For each line of standard input, a `Case`
as JSON, it receives a `Run` as a line of JSON; the engine ends where its input does, or at SIGTERM.
So it imports no other part, and -P keeps their names (`table`, `process`) away from what vLLM
imports.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, Self

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}

LEAST_PROMPTS = 32
"""Fewer are over so soon that a single slow step shows."""


@dataclass(frozen=True)
class Case:
    """What one measurement is of."""

    concurrency: int
    temperature: float
    task: str | None = None


@dataclass(frozen=True)
class Job:
    """An engine, and what all of its measurements have in common.

    Attributes:
        engine: the arguments of `vllm.LLM`.
        seed: of them, unless `engine` has another one. Requests have none of their own, as most in
            practice: a repeat on the same engine has other samples as its random state moves on,
            one on a fresh engine needs another seed for that.
        prompts: token ids.
        prompts_per_request: how many of them (of a task) a case answers, per request in flight,
            but LEAST_PROMPTS of all tasks; None for all at every level.
        max_tokens: the most tokens that a request outputs.
        ignore_eos: output that many in any case.
        tasks: one per prompt; None where they have none.
        min_tokens: the most tokens of a request are drawn from here to `max_tokens`; None for
            `max_tokens` of all.
    """

    engine: dict[str, Any]
    seed: int
    prompts: list[list[int]]
    prompts_per_request: int | None
    max_tokens: int
    ignore_eos: bool
    tasks: list[str | None]
    min_tokens: int | None = None

    def prompts_of(self, case: Case) -> list[list[int]]:
        """All of its task, again from the first one where fewer than shall be in flight."""
        placed = zip(self.prompts, self.tasks, strict=True)
        prompts = [prompt for prompt, task in placed if task == case.task]
        return list(islice(cycle(prompts), max(len(prompts), case.concurrency)))

    def prompts_at(self, case: Case) -> list[list[int]]:
        """The prompts that a case answers, the same for every method: the first of its task."""
        prompts = self.prompts_of(case)
        if self.prompts_per_request is None:
            return prompts
        least = -(-LEAST_PROMPTS // len(set(self.tasks)))
        return prompts[: max(least, case.concurrency * self.prompts_per_request)]

    @property
    def is_suffix_decoding(self) -> bool:
        return (self.engine.get("speculative_config") or {}).get("method") == "suffix"

    def lengths(self, requests: int) -> list[int]:
        """The most tokens of each request, the same for every method."""
        least = self.max_tokens if self.min_tokens is None else self.min_tokens
        drawn = random.Random(0)
        return [drawn.randint(least, self.max_tokens) for _ in range(requests)]


@dataclass(frozen=True)
class Generation:
    """All prompts answered once.

    Attributes:
        outputs: the tokens of each request.
        seconds: of wall time, from the first request's arrival to the last token.
        steps: engine steps that output tokens.
        request_steps: the requests that output tokens, summed over steps.
    """

    outputs: list[list[int]]
    seconds: float
    steps: int
    request_steps: int


@dataclass(frozen=True)
class Run:
    """A measured `Generation`.

    Attributes:
        spec_decode: vLLM's own counters of speculation (n-gram: steps without a proposal are not
            counted as drafts).
    """

    case: Case
    generation: Generation
    spec_decode: dict[str, int]

    @classmethod
    def from_json(cls, line: str) -> Self:
        case, generation, spec_decode = json.loads(line).values()
        return cls(Case(**case), Generation(**generation), spec_decode)


def generate(
    llm: Any, prompts: Sequence[list[int]], params: Sequence[Any], concurrency: int
) -> Generation:
    """Answer all prompts, `concurrency` of them in flight as long as there are enough left.

    `LLM.generate` would hand all prompts to the scheduler at once, whose limit is the engine's.
    """
    from vllm_redrafter.offline.llm import EngineRequest, run_requests

    asked = zip(prompts, params, strict=True)
    requests = (EngineRequest(str(i), *request) for i, request in enumerate(asked))
    outputs: list[list[int]] = [[] for _ in prompts]
    steps = request_steps = 0
    started = perf_counter()
    for step in run_requests(llm.llm_engine, lambda: next(requests, None), concurrency):
        with_tokens = 0
        for output in step:
            tokens = output.outputs[0].token_ids
            outputs[int(output.request_id)].extend(tokens)
            with_tokens += len(tokens) > 0
        request_steps += with_tokens
        steps += with_tokens > 0
    return Generation(outputs, perf_counter() - started, steps, request_steps)


def measure(llm: Any, job: Job, case: Case) -> Run:
    """Warm up, as a server is when it is used, then answer the case's prompts under the clock.

    No answer, of the warm-up or of a measurement before, is known to one of the next.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def answer(prompts: Sequence[list[int]]) -> Generation:
        params = [
            SamplingParams(
                temperature=case.temperature,
                max_tokens=length,
                ignore_eos=job.ignore_eos,
                output_kind=RequestOutputKind.DELTA,
            )
            for length in job.lengths(len(prompts))
        ]
        return generate(llm, prompts, params, case.concurrency)

    # An answer per request in flight, to the last prompts, which a level asks last if at all.
    answer(job.prompts_of(case)[-case.concurrency :])
    # Workers hear with the next step that requests have ended, and keep their answers then. That of
    # this one is too short for it.
    generate(llm, job.prompts[:1], [SamplingParams(max_tokens=1)], 1)
    llm.reset_prefix_cache()  # and with it what ReDrafter keeps
    if job.is_suffix_decoding:
        llm.collective_rpc(empty_suffix_cache)
    before = counters(llm)
    generation = answer(job.prompts_at(case))
    counted = {name: value - before[name] for name, value in counters(llm).items()}
    return Run(case, generation, counted)


def empty_suffix_cache(worker: Any) -> None:
    """Forget the answers that vLLM's suffix decoding keeps, whatever its prefix cache forgets."""
    proposer = worker.model_runner.drafter
    kept = proposer.suffix_cache
    proposer.suffix_cache = type(kept)(kept.max_tree_depth, kept.max_cached_requests)


def counters(llm: Any) -> dict[str, int]:
    """vLLM's counters of speculation so far; empty for plain decoding."""
    return {
        COUNTERS[metric.name]: metric.value
        for metric in llm.get_metrics()
        if metric.name in COUNTERS
    }


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    if job.is_suffix_decoding:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # it is sent a function
    from vllm import LLM

    # An exception, so that vLLM takes its other processes and shared memory along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    llm = LLM(**{"seed": job.seed, **job.engine})
    with Path(sys.argv[2]).open("w") as results:
        for line in sys.stdin:
            run = measure(llm, job, Case(**json.loads(line)))
            print(json.dumps(asdict(run)), file=results, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
