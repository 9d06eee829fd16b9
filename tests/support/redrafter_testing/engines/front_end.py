# SPDX-License-Identifier: Apache-2.0
"""A server's front end, whose engines may be several and anywhere, in a process of its own."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redrafter_testing import process_trees
from redrafter_testing.engines.interpreted_engine import settle_worker, use_torch_attention
from redrafter_testing.oracles.oracle_v2 import schedule_asynchronously
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.workloads import Workload

ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "block_size": 32,
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,  # zeros are written to all
}


def answers_of(
    environment: Mapping[str, str],
    target: Path,
    drafter: Path,
    samplings: tuple[str, ...] = ("greedy",),
    count: int = 8,
    **arguments: Any,
) -> dict[str, Any]:
    """What its process prints: `answers` by sampling; counters `accepted`, `verified` by engine."""
    speculative = {"model": str(drafter), "num_speculative_tokens": 8}
    engine = {**ARGUMENTS, "model": str(target), "speculative_config": speculative, **arguments}
    asked = json.dumps([samplings, count, engine])
    command = [sys.executable, "-P", __file__, asked]
    printed = process_trees.output_of(command, env={**os.environ, **environment})
    (line,) = (line for line in printed.splitlines() if line.startswith('{"answers"'))
    found: dict[str, Any] = json.loads(line)
    return found


@contextmanager
def headless(
    environment: Mapping[str, str], target: Path, drafter: Path, **arguments: Any
) -> Iterator[None]:
    """Another node of the same deployment, without a front end, while the body runs."""
    speculative = {"model": str(drafter), "num_speculative_tokens": 8}
    options = ["--headless", "--speculative-config", json.dumps(speculative)]
    for name, value in {**ARGUMENTS, **arguments}.items():
        options.append(f"--{name.replace('_', '-')}")
        if value is not True:
            options.append(str(value))
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", target, *options]
    env = process_trees.forking({**os.environ, **environment})
    with process_trees.started(command, env=env):
        yield


async def main(samplings: list[str], count: int, arguments: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if "pipeline_parallel_size" in arguments:
        schedule_asynchronously()
    if "TRITON_INTERPRET" in os.environ:
        use_torch_attention()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    if "TRITON_INTERPRET" in os.environ:
        await engine.collective_rpc(settle_worker)
    answers = {s: await _answers(engine, few_tokens.requests(s, count)) for s in samplings}
    found = {
        "answers": answers,
        "accepted": _counted("vllm:spec_decode_num_accepted_tokens"),
        "verified": _counted("redrafter:verifications"),
    }
    print(json.dumps(found), flush=True)
    engine.shutdown()


async def _answers(engine: Any, requests: Workload) -> list[list[int]]:
    async def answer(index: int) -> list[int]:
        params = requests.params[index]
        params.detokenize = False
        prompt = {"prompt_token_ids": requests.prompts[index]}
        async for output in engine.generate(prompt, params, f"{params.seed}-{id(requests)}"):
            last = output
        return list(last.outputs[0].token_ids)

    return await asyncio.gather(*(answer(index) for index in range(len(requests.prompts))))


def _counted(name: str) -> dict[str, float]:
    from prometheus_client import REGISTRY

    samples = (s for metric in REGISTRY.collect() if metric.name == name for s in metric.samples)
    return {s.labels["engine"]: s.value for s in samples if s.name == f"{name}_total"}


if __name__ == "__main__":
    asyncio.run(main(*json.loads(sys.argv[1])))
