"""`vllm serve --spec-model` through the OpenAI client: streamed answers equal plain decoding's."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import workloads

pytestmark = pytest.mark.engine

CONCURRENT = 32
ABORTED = range(3, CONCURRENT, 4)
GREEDY = workloads.greedy(count=64, max_tokens=128)


@pytest.fixture(scope="module")
def server(target: Path, oracle_drafter: Path) -> Iterator[str]:
    """The address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = Path(__file__).parents[2] / "support" / "serve.py"
    arguments = (
        f"{target} --spec-model {oracle_drafter} --spec-tokens 12 --dtype float32 --enforce-eager "
        f"--max-num-seqs 32 --max-num-batched-tokens 448 --num-gpu-blocks-override 96 "
        f"--block-size 32 --host 127.0.0.1 --port {port} --served-model-name target"
    )
    process = subprocess.Popen([sys.executable, str(serve), *arguments.split()], env=os.environ)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, f"{address}/health")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server stopped while starting"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail("the server did not get ready")


async def stream(client: openai.AsyncOpenAI, index: int) -> list[int]:
    """One request's token ids; requests in ABORTED are dropped after some tokens."""
    tokens: list[int] = []
    answer = await client.completions.create(
        model="target",
        prompt=GREEDY.prompts[index],
        max_tokens=128,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in answer:
        tokens += chunk.choices[0].model_extra["token_ids"]
        if index in ABORTED and len(tokens) > 20 + index:
            await answer.close()
            break
    return tokens


def test_streamed_answers_equal_plain_with_requests_aborted_midway(
    server: str, plain: dict[str, list[Any]]
) -> None:
    async def all_requests() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            return await asyncio.gather(*(stream(client, i) for i in range(CONCURRENT)))

    for _ in range(2):  # the second time after aborts, and with cached prefixes
        answers = asyncio.run(all_requests())
        for index, tokens in enumerate(answers):
            expected = list(plain["greedy"][index].outputs[0].token_ids)[:128]
            if index in ABORTED:
                assert 20 < len(tokens) < 128
            assert tokens == expected[: len(tokens) if index in ABORTED else 128]
    with urllib.request.urlopen(f"{server}/metrics") as metrics:
        counters = metrics.read().decode()
    assert counter(counters, "vllm:spec_decode_num_draft_tokens_total") > 0
    accepted = counter(counters, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted > counter(counters, "vllm:spec_decode_num_drafts_total")


def counter(metrics: str, name: str) -> float:
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name)
    )
