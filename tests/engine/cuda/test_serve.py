# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --spec-model` on Model Runner V2, through the OpenAI client."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from redrafter_testing.engines.interpreted_engine import ENVIRONMENT
from redrafter_testing.engines.server import counter, server
from redrafter_testing.requests import small_workloads
from redrafter_testing.requests.small_workloads import GREEDY, GREEDY_TOKENS

pytestmark = pytest.mark.engine

CONCURRENT = 4


async def complete(client: openai.AsyncOpenAI, index: int, streamed: bool) -> list[int]:
    answer = await client.completions.create(
        model="target",
        prompt=GREEDY.prompts[index],
        max_tokens=GREEDY_TOKENS,
        temperature=0,
        stream=streamed,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    if not streamed:
        return list(answer.choices[0].model_extra["token_ids"])
    return [token async for chunk in answer for token in chunk.choices[0].model_extra["token_ids"]]


def test_streamed_and_whole_answers_equal_plain(
    small_target: Path, oracle_v2: Path, plain_v2: dict[str, list[Any]]
) -> None:
    async def all_requests(address: str) -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            requests = [(i, streamed) for streamed in (True, False) for i in range(CONCURRENT)]
            return await asyncio.gather(*(complete(client, *each) for each in requests))

    with server(
        f"{small_target} --spec-model {oracle_v2} --spec-tokens 12 --dtype float32 "
        f"--enforce-eager --max-num-seqs 8 --max-model-len {small_workloads.MAX_MODEL_LEN} "
        "--block-size 32 --served-model-name target",
        ENVIRONMENT,
    ) as address:
        answers = asyncio.run(all_requests(address))
        drafts = counter(address, "vllm:spec_decode_num_drafts_total")
        accepted = counter(address, "vllm:spec_decode_num_accepted_tokens_total")
        ours = [
            counter(address, f"redrafter:{name}_total")
            for name in ("verifications", "sampled_tokens", "drafted_nodes")
        ]
    expected = [
        list(answer.outputs[0].token_ids)[:GREEDY_TOKENS]
        for answer in plain_v2["greedy"][:CONCURRENT]
    ]
    assert answers == expected + expected
    assert accepted > drafts > 0, "trees were hardly used"
    verifications, sampled, nodes = ours
    # What the device counted reaches the front end a step later, and an end a step too late.
    assert drafts - 2 * CONCURRENT <= verifications <= drafts + 2 * CONCURRENT
    assert accepted < sampled <= accepted + verifications
    assert verifications < nodes <= 12 * verifications
