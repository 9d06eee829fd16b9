# SPDX-License-Identifier: Apache-2.0
"""vLLM's own drafter as the trunk of the tree.

Whatever it reads, output is plain decoding's: that it reads the accepted text, its drafts tell.
"""

from collections.abc import Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import budgets, followed_texts
from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import memory_pool, recorded_graphs, torch_drafting
from redrafter_testing.models.families import EXPERTS
from redrafter_testing.models.families.chained import CHAINED
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.vllm_drafters import Drafter, add_mtp_layer
from redrafter_testing.oracles import oracle_v2
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import assert_logprobs_close, single_tokens_of

pytestmark = pytest.mark.engine

Answers = dict[str, list[list[int]]]
LENGTH, NODES, REQUESTS, FEW = 4, 8, 5, 12
LONGEST = 69
"""Where the longest text ends: the last drafts would go beyond."""
# 5 trees of 9 nodes and a prompt's chunk; so few blocks that some requests are preempted.
TIGHT = {
    "max_num_seqs": REQUESTS,
    "max_model_len": LONGEST,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 10,
    "skip_tokenizer_init": True,
    # vLLM's MTP layers look into the target's configuration, of which they are a part.
    "hf_overrides": {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense"] * 2},
}


@pytest.fixture(scope="module", params=["draft_model", "eagle", "eagle3", "mtp"])
def drafter(request: Any, few_tokens_target: Path, tmp_path_factory: Any) -> Drafter:
    return Drafter(request.param, few_tokens_target, tmp_path_factory.mktemp(request.param))


def drafting_with(drafter: Drafter, nodes: int = NODES, **settings: Any) -> dict[str, Any]:
    draft = {"method": drafter.method, "model": str(drafter.folder)}
    draft["num_speculative_tokens"] = LENGTH
    return {"draft": draft, "num_speculative_tokens": nodes, **settings}


def share_afresh(
    llm: Engine,
    drafter: Drafter,
    plain: Answers,
    sampling: str,
    cached: bool = False,
    most: int = few_tokens.TOKENS,
) -> float:
    """How many drafts are those of a drafter that reads the text afresh; answers equal plain.

    `cached`: what was read before may still be known. `most`: of each answer's tokens.
    """
    if not cached:
        llm.call(reset_prefix_cache)
    llm.rpc(followed_texts.kept)
    asked = few_tokens.requests(sampling, REQUESTS)
    for params in asked.params:
        params.max_tokens = min(params.max_tokens, most)
    answers = single_tokens_of(llm.run(asked))
    assert answers == [answer[:most] for answer in plain[sampling][:REQUESTS]]
    (drafted,) = llm.rpc(followed_texts.kept)
    assert len(drafted) > 20
    possible = [(text, tokens[: LONGEST - len(text)]) for text, tokens in drafted]
    equal = [drafter(text, len(tokens)) == tokens for text, tokens in possible]
    return sum(equal) / len(equal)


@pytest.fixture(scope="module")
def fixed(drafter: Drafter, few_tokens_target: Path) -> Iterator[Engine]:
    """Trees of eight nodes in every step, scheduled asynchronously."""
    with interpreted_engine(
        few_tokens_target,
        setup=partial(memory_pool.use, oracle_v2.schedule_asynchronously),
        speculative_config=drafting_with(drafter, adaptive=False),
        **TIGHT,
    ) as llm:
        llm.rpc(followed_texts.keep)
        yield llm


@pytest.mark.parametrize("sampling", few_tokens.SAMPLING)
def test_drafts_are_those_of_the_text_read_afresh(
    fixed: Engine, drafter: Drafter, few_tokens_plain: Answers, sampling: str
) -> None:
    assert share_afresh(fixed, drafter, few_tokens_plain, sampling) == 1
    assert fixed.counter("vllm:num_preemptions") > 0
    fixed.rpc(torch_drafting.use_kernels)
    share = share_afresh(fixed, drafter, few_tokens_plain, sampling, cached=True, most=FEW)
    fixed.rpc(torch_drafting.use)
    assert share == 1
    # EAGLE reads the last cached block again, and there is no other.
    assert fixed.counter("vllm:prefix_cache_hits") > 0 or drafter.method != "draft_model"


def test_logprobs_are_plain_s(fixed: Engine, few_tokens_target: Path) -> None:
    asked = few_tokens.requests("sampled", REQUESTS)
    for params in asked.params:
        params.logprobs = 3
    with interpreted_engine(few_tokens_target, skip_tokenizer_init=True) as plain:
        expected = plain.run(asked)
    for answer, wanted in zip(fixed.run(asked), expected, strict=True):
        assert_logprobs_close(answer, wanted)


def test_weights_are_replaced_by_vllm_s_own_call_and_after_sleep(
    fixed: Engine, drafter: Drafter, few_tokens_plain: Answers, tmp_path: Path
) -> None:
    other = Drafter(drafter.method, drafter.target, tmp_path, seed=4)
    fixed.rpc(followed_texts.update_draft_weights, other.folder)
    assert share_afresh(fixed, other, few_tokens_plain, "greedy", most=FEW) == 1
    fixed.call(methodcaller("sleep", 2))
    fixed.call(methodcaller("wake_up"))
    fixed.rpc("reload_weights")
    fixed.rpc(followed_texts.update_draft_weights, drafter.folder)
    assert share_afresh(fixed, drafter, few_tokens_plain, "greedy", most=FEW) == 1


@pytest.mark.parametrize("moved", [1, 2], ids=["tokens", "states"])
def test_a_drafter_that_reads_something_else_drafts_something_else(
    fixed: Engine, drafter: Drafter, few_tokens_plain: Answers, moved: int
) -> None:
    """The controls: what the test above asserts would fail."""
    if drafter.method == "draft_model" and moved == 1:
        pytest.skip("it reads tokens alone")
    fixed.rpc(followed_texts.spoil, moved)
    assert share_afresh(fixed, drafter, few_tokens_plain, "greedy", most=FEW) < 0.95
    fixed.rpc(followed_texts.spoil, None)


def test_a_chain_alone_is_vllm_s_own(drafter: Drafter, few_tokens_target: Path) -> None:
    chains = drafting_with(drafter, LENGTH, tree="chain", context_matches=0, adaptive=False)
    drafted = []
    for config in (chains, chains["draft"]):
        with interpreted_engine(few_tokens_target, speculative_config=config, **TIGHT) as llm:
            llm.rpc(followed_texts.keep)
            llm.run(few_tokens.requests("greedy", REQUESTS))
            drafted.append(sorted(llm.rpc(followed_texts.kept)[0]))
    assert drafted[0] == drafted[1] and drafted[0]


@pytest.fixture(scope="module")
def trimmed(drafter: Drafter, few_tokens_target: Path) -> Iterator[Engine]:
    """Graphs of the target's steps, of the drafter's and of the draft's; budgets are forced."""
    with interpreted_engine(
        few_tokens_target,
        setup=partial(recorded_graphs.use, (2, 8, 32, 45), flash_attention=True),
        enforce_eager=False,
        speculative_config=drafting_with(
            drafter, num_speculative_tokens_per_batch_size=[[1, 3, NODES], [4, REQUESTS, 6]]
        ),
        **TIGHT,
    ) as llm:
        llm.rpc(followed_texts.keep)
        yield llm


@pytest.mark.parametrize("sampling", few_tokens.SAMPLING)
def test_trimmed_trees_and_steps_without_a_draft_leave_drafts_as_they_are(
    trimmed: Engine, drafter: Drafter, few_tokens_plain: Answers, sampling: str
) -> None:
    trimmed.rpc(recorded_graphs.replay, True)
    trimmed.rpc(budgets.force, 0.8)
    assert share_afresh(trimmed, drafter, few_tokens_plain, sampling) == 1
    (lengths,) = trimmed.rpc(budgets.lengths)
    assert set(lengths) == {0, LENGTH}


@pytest.mark.parametrize(
    "family",
    [f for f in (*EXPERTS, *CHAINED) if f.name.startswith(("Glm4Moe", "Qwen3Next", "Deepseek"))],
    ids=lambda family: family.name,
)
def test_mtp_layers_of_the_target_s_own_draft_what_they_draft_in_vllm_s_chains(
    family: Family, tmp_path: Path
) -> None:
    """On trees, and on chains of recurrent layers and of MLA."""
    target = family.make(tmp_path / "target")
    add_mtp_layer(target)
    asked, own = family.questions(4, 24), {"method": "mtp", "num_speculative_tokens": 3}
    arguments = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, **family.arguments}
    with interpreted_engine(target, **arguments) as plain:
        expected = plain.run(asked)
    drafts = []
    for config in (own, {"draft": own, "num_speculative_tokens": 6, "adaptive": False}):
        with interpreted_engine(
            target, attention_kernels=True, speculative_config=config, **arguments
        ) as llm:
            llm.rpc(followed_texts.keep)
            answers = llm.run(asked)
            (drafted,) = llm.rpc(followed_texts.kept)
            drafts.append({tuple(text): tokens for text, tokens in drafted})
    assert answers == expected, "ours: vLLM's own noise is another"
    both = drafts[0].keys() & drafts[1].keys()
    assert len(both) > 20 and all(drafts[0][text] == drafts[1][text] for text in both)
