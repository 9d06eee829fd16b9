# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for something of their own, on both engines: each gets it as from plain vLLM.

Log-probabilities, whatever the others ask; the nodes that it wants; a prompt that is cached but for
one token; sessions whose input comes in pieces; priorities; and continuations that are looked for
in a request's own text alone.
"""

from collections.abc import Iterator
from itertools import combinations_with_replacement
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from redrafter_testing.engines import searched_texts
from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine, answers_by_priority, answers_in_sessions
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import assert_same, single_tokens_of
from redrafter_testing.requests.few_tokens import Answers
from redrafter_testing.requests.workloads import Workload

pytestmark = pytest.mark.engine

ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": -1},
    {"logprob_token_ids": [7]},
    {"logprob_token_ids": [3, 9, 11, 20]},
    {"logprobs": 2, "logprob_token_ids": [9, 3]},
    {"prompt_logprobs": 2},
    {"prompt_logprobs": -1, "logprobs": 1},
]
CACHED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "repetition penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "temperature": {"temperature": 0.8, "seed": 5},
}
PIECES, TOKENS = 4, 11


def asked(*kinds: int) -> Workload:
    """A request of each kind, in one batch."""
    prompts = [few_tokens.requests("sampled").prompts[kind % 3] for kind in kinds]
    sampling = few_tokens.SAMPLING["sampled"] | {"max_tokens": 10, "ignore_eos": True}
    params = [SamplingParams(**sampling, seed=kind, **ASKED[kind]) for kind in kinds]
    return Workload(prompts, params)


def sessions() -> tuple[Workload, int, Workload]:
    """Sessions, pieces of each one's input, and requests beside them."""
    greedy, sampled = (few_tokens.requests(sampling, count=2) for sampling in few_tokens.SAMPLING)
    made = Workload([*greedy.prompts, *sampled.prompts], [*greedy.params, *sampled.params])
    beside = few_tokens.requests("greedy", count=4)
    for params in (*made.params, *beside.params):
        params.output_kind = RequestOutputKind.DELTA
    for params in made.params:
        params.max_tokens = TOKENS
    return made, PIECES, beside


class Plain(NamedTuple):
    """What plain vLLM answers."""

    in_sessions: Any
    alone: list[Any]
    """To each kind of ASKED."""


ARGUMENTS: dict[str, Any] = {"max_logprobs": -1, "max_model_len": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def undrafted(start: Any, few_tokens_target: Path) -> Plain:
    with start(few_tokens_target, **ARGUMENTS) as plain:
        alone = [plain.run(asked(kind))[0] for kind in range(len(ASKED))]
        return Plain(plain.call(answers_in_sessions, *sessions()), alone)


@pytest.fixture(scope="module")
def llm(start: Any, few_tokens_target: Path, few_tokens_drafter: Path) -> Iterator[Engine]:
    """It drafts, with a KV cache too small."""
    config = {"model": str(few_tokens_drafter), "num_speculative_tokens": 8, "adaptive": False}
    arguments = {**ARGUMENTS, "scheduling_policy": "priority", "num_gpu_blocks_override": 12}
    with start(few_tokens_target, speculative_config=config, **arguments) as drafting:
        yield drafting


def test_a_request_gets_the_logprobs_that_plain_vllm_gives_it_alone(
    llm: Engine, undrafted: Plain
) -> None:
    llm.rpc("reset_redrafter_stats")
    for kinds in combinations_with_replacement(range(len(ASKED)), 2):
        expected = [undrafted.alone[kind] for kind in kinds]
        assert_same(llm.run(asked(*kinds)), expected, map(str, kinds))
    (stats,) = llm.rpc("redrafter_stats")
    assert stats["sampled_tokens"] > stats["verifications"] + 20, "little was accepted"


@pytest.mark.parametrize("limits", [[0] * 4, [2] * 4, [0, 1, 5, 8]], ids=str)
def test_no_request_has_more_nodes_verified_than_it_asks_for(
    limits: list[int], llm: Engine, few_tokens_plain: Answers
) -> None:
    load = few_tokens.requests("greedy", count=4)
    for params, nodes in zip(load.params, limits, strict=True):
        params.extra_args = {"redrafter": {"spec_tokens": nodes}}
    llm.rpc("reset_redrafter_stats")
    assert llm.tokens(load) == few_tokens_plain["greedy"][:4]
    (stats,) = llm.rpc("redrafter_stats")
    assert stats["drafted_tokens"] <= max(limits) * stats["verifications"]
    assert (stats["drafted_tokens"] > 0) == any(limits)
    assert any(limits) or stats["undrafted_steps"] > 20


@pytest.mark.parametrize("name", CACHED)
def test_a_prompt_that_is_cached_but_for_one_token_is_no_draft(name: str, llm: Engine) -> None:
    """vLLM pads its first step to a verification, of which there is nothing to verify."""
    # One block of 32 tokens and one token more; another text for each case.
    prompt = [(token * (5 + len(name))) % few_tokens.VOCAB for token in range(33)]
    load = Workload([prompt], [SamplingParams(max_tokens=40, ignore_eos=True, **CACHED[name])])
    whole = llm.tokens(load)
    cached = llm.counter("vllm:prefix_cache_hits")
    names = [f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens")]
    before = [*map(llm.counter, names)]
    llm.rpc("reset_redrafter_stats")
    assert llm.tokens(load) == whole
    assert llm.counter("vllm:prefix_cache_hits") == cached + 32
    (stats,) = llm.rpc("redrafter_stats")
    counted = [now - then for now, then in zip(map(llm.counter, names), before, strict=True)]
    assert counted == [stats["verifications"], stats["drafted_tokens"]]
    assert stats["verifications"] > 0


def test_answers_in_sessions_while_requests_beside_are_drafted_for(
    llm: Engine, undrafted: Plain
) -> None:
    before = llm.accepted()
    assert llm.call(answers_in_sessions, *sessions()) == undrafted.in_sessions
    assert llm.accepted() > before
    assert [len(answer) for answer in undrafted.in_sessions[0]] == [PIECES * TOKENS] * 4


def test_answers_by_priority(llm: Engine, few_tokens_plain: Answers) -> None:
    before = llm.accepted()
    answers = llm.call(answers_by_priority, few_tokens.requests("greedy"))
    assert single_tokens_of(answers) == few_tokens_plain["greedy"]
    assert llm.counter("vllm:num_preemptions") > 0
    assert llm.accepted() > before


def test_rows_of_tokens_embeddings_preempted_and_aborted_requests_hold_their_own_text(
    start: Any, few_tokens_target: Path
) -> None:
    record, stands_for_embedding = {
        cpu_engine: (searched_texts.record_on_cpu, few_tokens.VOCAB),
        interpreted_engine: (searched_texts.record_on_v2, 0),
    }[start]
    with start(
        few_tokens_target,
        enable_prompt_embeds=True,
        speculative_config={"method": "redrafter", "num_speculative_tokens": 6, "adaptive": False},
        num_gpu_blocks_override=11,
        max_num_seqs=4,
        max_model_len=256,
    ) as llm:
        llm.rpc(record)
        answers = llm.call(searched_texts.run_all_kinds, 24, few_tokens.VOCAB, few_tokens.HIDDEN)
        (searched,) = llm.rpc(attrgetter("searched"))
        assert llm.counter("vllm:num_preemptions") > 0
    kinds = set()
    for request, text in searched:
        prompt, output = answers[request.split("-")[0]]
        own = [stands_for_embedding] * prompt if isinstance(prompt, int) else prompt
        whole = own + output
        assert text[: len(whole)] == whole[: len(text)]
        kinds.add((type(prompt), len(text) > len(own)))
    assert kinds >= {(int, True), (list, True)}
