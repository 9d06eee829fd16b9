"""Two engines behind one front end: data_parallel.py TARGET DRAFTER MORE, in its own process.

MORE are further arguments of vLLM's engine, as JSON. Prints as JSON the answers to
`few_tokens.requests("greedy")` and vLLM's counter of accepted draft tokens by engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from redrafter_testing.engines.interpreted_engine import settle_worker
from redrafter_testing.requests import few_tokens


async def main(target: str, drafter: str, more: str) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=target,
            data_parallel_size=2,
            speculative_config={"model": drafter, "num_speculative_tokens": 8},
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_num_seqs=8,
            block_size=32,
            max_model_len=256,
            **json.loads(more),
        )
    )

    if "TRITON_INTERPRET" in os.environ:
        await engine.collective_rpc(settle_worker)

    async def answer(index: int, prompt: list[int], params: SamplingParams) -> list[int]:
        params.detokenize = False
        async for output in engine.generate({"prompt_token_ids": prompt}, params, str(index)):
            last = output
        return list(last.outputs[0].token_ids)

    requests = few_tokens.requests("greedy")
    pairs: Any = enumerate(zip(requests.prompts, requests.params, strict=True))
    answers = await asyncio.gather(*(answer(i, prompt, params) for i, (prompt, params) in pairs))
    accepted = {
        metric.labels["engine"]: metric.value
        for metric in get_metrics_snapshot()
        if metric.name == "vllm:spec_decode_num_accepted_tokens"
    }
    engine.shutdown()
    print(json.dumps({"answers": answers, "accepted": accepted}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
