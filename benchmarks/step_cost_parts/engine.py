"""The process of one engine: all cases of a job, timed."""

from __future__ import annotations

from typing import Any

from step_cost_parts import clock
from step_cost_parts.jobs import SHAPES, WARM_UP_STEPS, Job, engine_arguments
from step_cost_parts.report import Cost


def measure(job: Job) -> list[Cost]:
    """One case after the other."""
    from vllm import LLM

    llm = LLM(job.folder, **engine_arguments(job))
    llm.collective_rpc(clock.install)
    costs = []
    for requests, context in job.cases:
        steps = timed_steps(llm, job, requests, context)
        costs.append(Cost.of(job.target, job.nodes, requests, context, steps))
    return costs


def timed_steps(llm: Any, job: Job, requests: int, context: int) -> list[dict[str, float]]:
    """The steps of one run, those of the warm-up left out."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=WARM_UP_STEPS + job.steps,
        ignore_eos=True,
        detokenize=False,
    )
    vocabulary = SHAPES[job.target]["vocab_size"]
    prompts = [
        {"prompt_token_ids": [(7919 * (i + 1) * (t + 1)) % vocabulary for t in range(context)]}
        for i in range(requests)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    (steps,) = llm.collective_rpc(clock.read, args=(requests,))
    if len(steps) <= WARM_UP_STEPS:
        raise RuntimeError(
            f"batch {requests}, context {context}: only {len(steps)} decoding steps of the whole "
            "batch were seen; raise --steps"
        )
    return steps[WARM_UP_STEPS:]
