# SPDX-License-Identifier: Apache-2.0
"""KV connectors are given the rows of an engine without drafts, and what they bring back serves."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from redrafter_testing.engines import kv_connectors
from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Setup
from redrafter_testing.engines.interpreted_engine import interpreted_engine, use_triton_attention
from redrafter_testing.oracles.oracle_v2 import schedule_asynchronously
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.few_tokens import Answers, conversations, opening
from redrafter_testing.requests.workloads import Workload

pytestmark = pytest.mark.engine

SHAPE = {"num_speculative_tokens": 16, "beam_width": 12, "beam_length": 3, "adaptive": False}
# Three requests of four fit into the KV cache to their end.
TIGHT = {"num_gpu_blocks_override": 10, "max_model_len": 192}

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
OTHERS = Workload([[token] * 170 for token in (3, 4)], [ONE_TOKEN] * 2)
"""They fill a small cache."""
PROMPT_BLOCKS = 5
"""Blocks of 32 tokens that the four prompts fill."""


Kind = Callable[..., Any]
"""One of our two engines, and plain vLLM on the same model runner."""
CPU: Kind = functools.partial(cpu_engine, setup=kv_connectors.use)
AS_OURS = (kv_connectors.use, use_triton_attention)
"""Plain engines keep their cache as ours do."""
V2: Kind = functools.partial(interpreted_engine, setup=AS_OURS)


class Undrafted(NamedTuple):
    """Of an engine without drafts: answers that needed no connector, and what it was given."""

    answers: Answers
    stored: dict[bytes, torch.Tensor]


@pytest.fixture(scope="module")
def undrafted(few_tokens_target: Path) -> Callable[[Kind], Undrafted]:
    @functools.cache
    def of(kind: Kind) -> Undrafted:
        with kind(few_tokens_target, kv_transfer_config=kv_connectors.OFFLOADING) as llm:
            answers = conversations(llm, OTHERS)
            assert llm.rpc(kv_connectors.loaded_blocks) == [0]
            return Undrafted(answers, llm.call(kv_connectors.stored_blocks))

    return of


@pytest.mark.parametrize(
    ("kind", "setup"),
    [(CPU, kv_connectors.use), (V2, (schedule_asynchronously, *AS_OURS))],
    ids=["cpu", "v2, asynchronous"],
)
def test_offloading_with_eviction_return_and_preemption(
    kind: Kind,
    setup: Setup,
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    undrafted: Callable[[Kind], Undrafted],
) -> None:
    with kind(
        few_tokens_target,
        kv_transfer_config=kv_connectors.OFFLOADING,
        setup=setup,
        speculative_config={"model": str(few_tokens_drafter), **SHAPE},
        **TIGHT,
    ) as llm:
        assert conversations(llm, OTHERS) == undrafted(kind).answers
        assert llm.counter("vllm:num_preemptions") > 0
        assert llm.accepted() > 50
        assert llm.rpc(kv_connectors.loaded_blocks)[0] > 20
        stored = llm.call(kv_connectors.stored_blocks)
    torch.testing.assert_close(stored, undrafted(kind).stored, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [CPU, V2], ids=["cpu", "v2"])
def test_a_plain_engine_reads_prompts_and_ours_answers(
    kind: Kind,
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    undrafted: Callable[[Kind], Undrafted],
    tmp_path: Path,
) -> None:
    """With no more than the target's K and V: the drafter has none. That a plain engine could read
    what ours stores is shown above: it is the same."""
    transfer = {"kv_transfer_config": kv_connectors.example(tmp_path)}
    prompts = opening("greedy").prompts
    with kind(few_tokens_target, **transfer) as plain:
        plain.run(Workload(prompts, [ONE_TOKEN] * len(prompts)))
    with kind(
        few_tokens_target,
        enable_prefix_caching=False,
        speculative_config={"model": str(few_tokens_drafter), **SHAPE},
        **transfer,
    ) as llm:
        for sampling in few_tokens.SAMPLING:
            assert llm.tokens(opening(sampling)) == undrafted(kind).answers[f"{sampling}, first"]
        assert llm.counter("vllm:external_prefix_cache_hits") == 2 * PROMPT_BLOCKS * 32
        assert llm.accepted() > 40
