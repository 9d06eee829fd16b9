# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --spec-model` through the OpenAI client: streamed answers equal plain decoding's."""

import asyncio
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.server import counter, server
from redrafter_testing.models.checkpoints import edit_tensors
from redrafter_testing.own_commands import printed_by, refusal_of
from redrafter_testing.requests import workloads
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.dataset import read_dataset
from vllm_redrafter.data.endpoints import EndpointEngine
from vllm_redrafter.data.generation import generate_data
from vllm_redrafter.data.settings import GenerationSettings, SamplingSettings
from vllm_redrafter.data.target import Target

pytestmark = pytest.mark.engine

CONCURRENT = 32
ABORTED = range(3, CONCURRENT, 4)
GREEDY = workloads.greedy(count=64, max_tokens=128)


@pytest.fixture(scope="module")
def address(
    target: Path, oracle_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(APPENDING)
    # Whether drafting pays is not asked: the oracle's trees are to be used.
    speculative = {"model": str(oracle_drafter), "num_speculative_tokens": 12, "adaptive": False}
    with server(
        f"{target} --chat-template {template} --dtype float32 --enforce-eager "
        f"--speculative-config {json.dumps(speculative, separators=(',', ':'))} "
        "--max-num-seqs 32 --max-num-batched-tokens 448 --num-gpu-blocks-override 96 "
        "--block-size 32 --served-model-name target --api-server-count 2",
        {"VLLM_SERVER_DEV_MODE": "1"},
    ) as address:
        yield address


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
    address: str, plain: dict[str, list[Any]]
) -> None:
    async def all_requests() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            return await asyncio.gather(*(stream(client, i) for i in range(CONCURRENT)))

    for _ in range(2):  # the second time after aborts, and with cached prefixes
        answers = asyncio.run(all_requests())
        for index, tokens in enumerate(answers):
            expected = list(plain["greedy"][index].outputs[0].token_ids)[:128]
            if index in ABORTED:
                assert 20 < len(tokens) < 128
            assert tokens == expected[: len(tokens) if index in ABORTED else 128]
    assert counter(address, "vllm:spec_decode_num_draft_tokens_total") > 0
    accepted = counter(address, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted > counter(address, "vllm:spec_decode_num_drafts_total")


def test_metrics_show_the_counters_of_the_worker(address: str) -> None:
    theirs = {"redrafter:verifications": "drafts", "redrafter:drafted_nodes": "draft_tokens"}
    counters = [*theirs, "redrafter:steps", "redrafter:sampled_tokens"]
    names = [f"{name}_total" for name in counters]
    names += [
        f"vllm:spec_decode_num_{name}_total" for name in (*theirs.values(), "accepted_tokens")
    ]
    before = {name: counter(address, name) for name in names}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        ask(client, 12, max_tokens=64)
    verified, nodes, steps, sampled, drafts, draft_tokens, accepted = (
        counter(address, name) - before[name] for name in names
    )
    assert verified == steps == drafts > 1
    assert nodes == draft_tokens
    assert sampled == accepted + drafts


@pytest.mark.parametrize("max_nodes", [13, -1, "many", 2.5])
def test_a_request_that_asks_for_impossible_trees_is_answered_400(
    address: str, max_nodes: object
) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="integer from 0 to 12") as error:
            ask(client, max_nodes)
        assert repr(max_nodes) in str(error.value)
        assert ask(client, 12).choices[0].text


def ask(client: openai.OpenAI, spec_tokens: object, max_tokens: int = 4) -> Any:
    body = {"vllm_xargs": {"redrafter.spec_tokens": spec_tokens}}
    return client.completions.create(
        model="target", prompt=GREEDY.prompts[0], max_tokens=max_tokens, extra_body=body
    )


def test_the_command_replaces_the_drafter_of_a_server_unless_the_new_one_is_broken(
    address: str, oracle_drafter: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(oracle_drafter, tmp_path / "broken"))
    edit_tensors(broken, lambda tensors: tensors["rnn_w.weight"].fill_(torch.inf))
    refused = " ".join(refusal_of("swap", "--url", address, broken).split())
    expected = f"server at {address} refuses {broken} and keeps its own: <path>: rnn_w.weight holds"
    assert expected in refused and "stack trace" not in refused
    printed = printed_by("swap", "--url", address, oracle_drafter)
    assert printed == f"{address} drafts with {oracle_drafter} now"


def test_training_data_that_the_server_writes_is_the_target_s_own(
    address: str, target: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "target"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = APPENDING
    tokenizer.save_pretrained(folder)
    prompts = [Conversation((f"value {i}", f"list {i}")) for i in range(4)]
    settings = GenerationSettings(SamplingSettings(temperature=0.0, max_tokens=24), shard_size=2)
    said = Console(file=io.StringIO())

    def start(target: Target, settings: GenerationSettings) -> EndpointEngine:
        return EndpointEngine(address, target, settings, None)

    generate_data(str(folder), prompts, tmp_path / "data", start, settings, said)
    _, data = read_dataset(tmp_path / "data")
    # A row per answer where its text, tokenized again, is other tokens than those drawn.
    assert sorted(set(data["conversation"])) == [0, 1, 2, 3]
    num_written = 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row in data:
        with torch.inference_mode():
            logits = model(torch.tensor([row["input_ids"]])).logits[0]
        best = logits.argmax(dim=-1)
        written = [i for i, marked in enumerate(row["assistant_mask"]) if marked]
        num_written += len(written)
        for i in written:
            assert row["input_ids"][i] == best[i - 1]
    assert num_written > 4 * 24, "two answers each, of up to 24 tokens"
