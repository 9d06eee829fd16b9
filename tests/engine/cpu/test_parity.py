# SPDX-License-Identifier: Apache-2.0
"""Output with speculation equals output without it, through vLLM's CPU engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from redrafter_testing.algorithm.context_matches import slow_matches
from redrafter_testing.engines.cpu_engine import cpu_engine, measure_briefly
from redrafter_testing.engines.forked_engine import Engine, answers_in_steps, reset_prefix_cache
from redrafter_testing.engines.inside_cpu_worker import (
    AlwaysDrafts,
    MatchesAlone,
    NeverDrafts,
    RandomPlanner,
    compiled_loops,
    force,
    traced_graphs,
)
from redrafter_testing.models.families import families_on
from redrafter_testing.models.families.chained import CHAINED
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.families.quantised import require_kernel
from redrafter_testing.oracles import oracle as oracles
from redrafter_testing.requests import few_tokens, workloads
from redrafter_testing.requests.answers import assert_same, single_tokens_of
from redrafter_testing.requests.few_tokens import Answers
from redrafter_testing.requests.workloads import Plain
from vllm_redrafter.budget.planner import BatchPlanner

pytestmark = pytest.mark.engine

K = 15
MATCHES = 3
GREEDY = workloads.greedy(count=64, max_tokens=128)
PLANNERS = [RandomPlanner, AlwaysDrafts, NeverDrafts, None]


@contextmanager
def nothing_compiled(llm: Engine) -> Iterator[None]:
    """No request waits for a loop to be compiled: that is done at start-up."""
    (before,) = llm.rpc(compiled_loops)
    yield
    (after,) = llm.rpc(compiled_loops)
    assert {name for name, types in after.items() if types != before[name]} == set()


# A drafter that knows the answers, whatever each step's budget


@pytest.fixture(scope="module")
def oracle(target: Path, oracle_drafter: Path) -> Iterator[Engine]:
    """It speculates well at every step, with chunked prefill and a KV cache too small."""
    config = {
        "model": str(oracle_drafter),
        "num_speculative_tokens": K,
        "beam_width": oracles.WIDTH,
        "beam_length": oracles.LENGTH,
        "context_matches": 2,
    }
    # 16 trees of 16 nodes, and 32 tokens of a prompt: prompts are read in chunks. 64 blocks of 32
    # tokens do not hold 16 requests to their end: some are preempted.
    with cpu_engine(
        target,
        setup=oracles.use,
        speculative_config=config,
        enable_prefix_caching=True,
        max_num_batched_tokens=288,
        num_gpu_blocks_override=64,
    ) as llm:
        llm.rpc(force, AlwaysDrafts)
        with nothing_compiled(llm):
            yield llm


@pytest.fixture(params=PLANNERS, ids=lambda kind: kind.__name__ if kind else "its own")
def planner(request: pytest.FixtureRequest, oracle: Engine) -> Iterator[type[BatchPlanner] | None]:
    oracle.rpc(force, request.param)
    oracle.rpc("reset_redrafter_stats")
    yield request.param
    oracle.rpc(force, AlwaysDrafts)


def test_greedy_with_chunks_prefix_caching_and_preemption(
    planner: type[BatchPlanner] | None, oracle: Engine, plain: Plain
) -> None:
    names = "vllm:num_preemptions", "vllm:prefix_cache_hits"
    before = [*map(oracle.counter, names)]
    expected = [tokens[:128] for tokens in single_tokens_of(plain["greedy"])]
    assert oracle.tokens(GREEDY) == expected
    assert all(now > then for now, then in zip(map(oracle.counter, names), before, strict=True))
    (stats,) = oracle.rpc("redrafter_stats")
    if planner is NeverDrafts:
        assert stats["drafted_tokens"] == 0
    else:
        assert stats["sampled_tokens"] > stats["verifications"] > 0
    if planner in (NeverDrafts, RandomPlanner):
        assert stats["undrafted_steps"] > 0
    if planner in (RandomPlanner, AlwaysDrafts):
        assert stats["accepted_matched_tokens"] > 0, "matches were not used"


def test_all_sampling_parameters_and_grammars_in_one_batch(
    planner: type[BatchPlanner] | None, oracle: Engine, plain: Plain
) -> None:
    names = [f"{name} {number}" for name in workloads.CASES for number in (1, 2)]
    assert_same(oracle.run(workloads.MIXED), plain["mixed"], names)
    (stats,) = oracle.rpc("redrafter_stats")
    if planner is AlwaysDrafts:
        assert stats["sampled_tokens"] > 1.2 * stats["verifications"], "little was accepted"


def test_the_engine_learns_how_probable_its_nodes_are(oracle: Engine) -> None:
    oracle.run(GREEDY)
    # The oracle's log-probabilities are noise: the slope falls from 0.5 to 0, about which it varies
    # by what the last few requests' nodes say.
    (slopes,) = oracle.rpc(attrgetter("model_runner.proposer.acceptance.slopes"))
    assert abs(slopes[0]) < 0.25


def test_max_model_len_reached_in_the_middle_of_a_tree(oracle: Engine, plain: Plain) -> None:
    # A prompt that leaves 20 tokens of max_model_len=512, then max_tokens far above.
    answer = plain["greedy"][0]
    known = list(answer.prompt_token_ids) + list(answer.outputs[0].token_ids)
    padding = [7] * (512 - 20 - len(known))
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    load = workloads.Workload([padding + known], [params])
    first = oracle.tokens(load)
    assert len(first[0]) == 20
    assert first == oracle.tokens(load)


# Features, on a target of so few tokens that a random drafter is often right


class Feature(NamedTuple):
    """A speculative config, other arguments of the engine, and the fixture of its drafter."""

    config: dict[str, Any]
    arguments: dict[str, Any]
    drafter: str | None = "few_tokens_drafter"


SEARCH = {"beam_width": 3, "beam_length": 3}
FIXED = {"num_speculative_tokens": 8, "adaptive": False}
# Too few blocks for all requests: some are preempted.
TIGHT = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 160,
    "num_gpu_blocks_override": 17,
}


def matches(adaptive: bool, drafter: str | None, **others: str) -> Feature:
    config = {"num_speculative_tokens": 12, "context_matches": MATCHES, "adaptive": adaptive}
    config["earlier_answers"] = 0
    return Feature(config | (SEARCH if drafter else {}) | others, TIGHT, drafter)


FEATURES = {
    "chain": Feature(FIXED | SEARCH | {"tree": "chain"}, TIGHT),
    "chain without a drafter": matches(False, None, tree="chain"),
    "compiled": Feature(FIXED, {"enforce_eager": False}, "few_tokens_fused_drafter"),
    "matches": matches(False, "few_tokens_drafter"),
    "matches, adaptive": matches(True, "few_tokens_drafter"),
    "matches without a drafter": matches(False, None),
    "matches without a drafter, adaptive": matches(True, None),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features(
    name: str,
    few_tokens_target: Path,
    few_tokens_plain_on_cpu: Answers,
    request: pytest.FixtureRequest,
) -> None:
    feature = FEATURES[name]
    config = {"method": "redrafter", **feature.config}
    if feature.drafter is not None:
        config["model"] = str(request.getfixturevalue(feature.drafter))
    with cpu_engine(few_tokens_target, speculative_config=config, **feature.arguments) as llm:
        if config["adaptive"]:
            llm.rpc(force, MatchesAlone)
        with nothing_compiled(llm):
            assert few_tokens.answers_of(llm) == few_tokens_plain_on_cpu
        (stats,) = llm.rpc("redrafter_stats")
        assert stats["sampled_tokens"] > 1.1 * stats["verifications"], "little was accepted"
        assert stats["matched_tokens"] >= stats["accepted_matched_tokens"] > 0
        if feature.arguments is TIGHT:
            assert llm.counter("vllm:num_preemptions") > 0
        if name == "compiled":
            assert llm.rpc(traced_graphs)[0] > 0
        if "tree" in config:
            assert stats["attention"] == 0.0, "trees were verified"
        if "context_matches" in config:
            check_count_of_matched_tokens(llm)


def check_count_of_matched_tokens(llm: Engine) -> None:
    """As many are counted as follow from the answers."""
    workload = few_tokens.requests("greedy")
    llm.rpc("reset_redrafter_stats")
    answers = llm.call(answers_in_steps, workload)
    (stats,) = llm.rpc("redrafter_stats")
    found = 0
    for prompt, steps in zip(workload.prompts, answers, strict=True):
        text = [*prompt]
        for step in steps:
            if accepted := step[:-1]:
                paths, _ = slow_matches(text, (MATCHES, len(accepted)), max(text) + 1)
                equal = (torch.tensor(paths) == torch.tensor(accepted)).cumprod(dim=1)
                found += int(equal.sum(dim=1).max())
            text += step
    # Some answers end within a match, of which the engine has accepted more.
    behind = stats["accepted_matched_tokens"] - found
    assert 0 <= behind <= len(answers) < found


# Families of targets


CHAINS = [family for family in CHAINED if "cpu" in family.engines]


@pytest.mark.parametrize("family", [*families_on("cpu"), *CHAINS], ids=lambda family: family.name)
def test_families(family: Family, tmp_path: Path) -> None:
    """Greedily and with seeds; those whose attention allows no trees verify chains."""
    require_kernel(family)
    target, drafter = family.make_pair(tmp_path)
    arguments = {"max_model_len": 256, **family.arguments}
    speculative = {"model": str(drafter), "num_speculative_tokens": 10}
    speculative |= {"beam_width": 1 if family in CHAINS else 5, "beam_length": 4}
    asked = family.questions(6, 40)
    with cpu_engine(target, **arguments) as plain:
        expected = plain.run(asked)
        if family.blank is not None:
            assert plain.run(family.blank(6, 40)) != expected
    # Chunks of prompts beside trees: plain vLLM ends at a seeded request that is read in chunks.
    arguments["max_num_batched_tokens"] = 96
    with cpu_engine(
        target, setup=measure_briefly, speculative_config=speculative, **arguments
    ) as llm:
        llm.rpc(force, AlwaysDrafts)
        assert llm.run(asked) == expected
        (stats,) = llm.rpc("redrafter_stats")
        assert stats["sampled_tokens"] > stats["verifications"] + 8, "little was accepted"
        assert (stats["attention"] == 0.0) == (family in CHAINS)
        llm.rpc(force, None)
        llm.call(reset_prefix_cache)
        assert llm.run(asked) == expected
