# SPDX-License-Identifier: Apache-2.0
"""Output with speculation equals plain output, on Model Runner V2 under Triton's interpreter.

One engine with an oracle for what requests may ask for; an engine for each family of targets.
"""

import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm import SamplingParams

from redrafter_testing.engines import budgets, inside_worker
from redrafter_testing.engines.forked_engine import Engine, run_with_aborts
from redrafter_testing.engines.interpreted_engine import interpreted_engine, use_triton_attention
from redrafter_testing.gpu import no_waiting, recorded_graphs
from redrafter_testing.models.families import families_on
from redrafter_testing.models.families.chained import CHAINED, WITHOUT_HEAD_DIM
from redrafter_testing.models.families.family import Family, Questions
from redrafter_testing.models.families.gemma import GEMMA
from redrafter_testing.models.families.quantised import require_kernel
from redrafter_testing.models.tiny_models import make_random_target
from redrafter_testing.oracles import oracle_v2
from redrafter_testing.oracles.oracle import write_oracle
from redrafter_testing.requests import few_tokens, small_workloads, workloads
from redrafter_testing.requests.answers import assert_same, single_tokens_of, tokens_of
from redrafter_testing.requests.few_tokens import Answers
from redrafter_testing.requests.small_workloads import (
    GREEDY,
    MAX_MODEL_LEN,
    REASONING_END,
    REASONING_START,
    greedy_of,
)
from redrafter_testing.requests.workloads import Plain

pytestmark = pytest.mark.engine

COUNTED = ("drafts", "accepted_tokens", "draft_tokens")


def counters(llm: Engine, before: list[float] | None = None) -> list[float]:
    """Drafts, accepted and drafted tokens, since `before`."""
    now = [llm.counter(f"vllm:spec_decode_num_{counted}") for counted in COUNTED]
    return now if before is None else [n - b for n, b in zip(now, before, strict=True)]


@pytest.mark.parametrize("sampled", [False, True])
def test_output_equals_plain_with_chunks_prefix_caching_and_preemption(
    oracle: Engine, plain_v2: Plain, sampled: bool
) -> None:
    oracle.rpc("reset_redrafter_stats")
    before = counters(oracle)
    answers = oracle.tokens(small_workloads.SAMPLED if sampled else GREEDY)
    assert answers == (single_tokens_of(plain_v2["sampled"]) if sampled else greedy_of(plain_v2))
    assert oracle.counter("vllm:num_preemptions") > 0
    assert oracle.counter("vllm:prefix_cache_hits") > 0
    drafts, accepted, nodes = counters(oracle, before)
    assert accepted > drafts, "trees were hardly used"
    (stats,) = oracle.rpc("redrafter_stats")
    # The worker verifies once more for a request whose end is not yet known to the scheduler, and
    # a request's last verification may output more than is taken.
    ends = len(answers)
    assert drafts <= stats["verifications"] <= drafts + ends
    assert accepted <= stats["sampled_tokens"] - stats["verifications"] <= accepted + 2 * ends * 5
    assert nodes <= stats["drafted_tokens"] <= nodes + ends * 12
    assert all(stats[part] > 0 for part in ("forward", "draft", "accept", "compact"))


def test_all_sampling_parameters_in_one_batch(oracle: Engine, plain_v2: Plain) -> None:
    """Logits above 1 GB are sampled in chunks of requests; of two trees here."""
    oracle.rpc(inside_worker.sample_in_chunks, 30)
    answers = oracle.run(small_workloads.MIXED)
    (chunks,) = oracle.rpc(inside_worker.stop_sampling_in_chunks)
    assert sum(number > 1 for number in chunks) > 10
    assert_same(answers, plain_v2["mixed"], workloads.CASES)


def test_aborted_requests_leave_the_others_as_they_were(oracle: Engine, plain_v2: Plain) -> None:
    aborted = [1, 4, 6]
    answers = oracle.call(run_with_aborts, GREEDY, aborted, 5)
    for index, expected in enumerate(greedy_of(plain_v2)):
        if index not in aborted:
            assert single_tokens_of([answers[index]]) == [expected]


def test_max_model_len_and_min_tokens_inside_a_tree(oracle: Engine, plain_v2: Plain) -> None:
    load, expected = small_workloads.ends(), plain_v2["ends"]
    answers = oracle.run(load)
    assert tokens_of(answers) == tokens_of(expected)
    reasons = [[o.finish_reason for o in answer.outputs] for answer in answers]
    assert reasons == [[o.finish_reason for o in answer.outputs] for answer in expected]
    for prompt, (tokens,) in zip(load.prompts[:3], tokens_of(answers), strict=False):
        assert len(prompt) + len(tokens) == MAX_MODEL_LEN
    least = [params.min_tokens for params in load.params[3:]]
    lengths = [len(tokens) for (tokens,) in tokens_of(answers)[3:]]
    assert all(a <= b for a, b in zip(least, lengths, strict=True))
    assert any(a < b < 20 for a, b in zip(least, lengths, strict=True)), "none ended by itself"


def test_a_stop_token_and_max_tokens_inside_a_tree(oracle: Engine, plain_v2: Plain) -> None:
    prompts, params, expected = [], [], []
    for index, ((tokens,), prompt) in enumerate(
        zip(tokens_of(plain_v2["greedy"]), GREEDY.prompts, strict=True)
    ):
        # One after another, to end at any place of a tree; in one batch, so that the others go on.
        end = 2 + 2 * index
        stop = tokens[end]
        prompts += [prompt, prompt]
        params += [
            SamplingParams(temperature=0, max_tokens=end, ignore_eos=True),
            SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True),
        ]
        expected += [[tokens[:end]], [tokens[: tokens.index(stop) + 1][:20]]]
    before = counters(oracle)
    answers = oracle.run(workloads.Workload(prompts, params))
    assert tokens_of(answers) == expected
    drafts, accepted, _ = counters(oracle, before)
    output = sum(len(tokens) for answer in expected for tokens in answer)
    # Each request's first token, and any in a step without a draft, is not counted.
    assert drafts + accepted + len(answers) - output > 5, "few requests ended inside a tree"


def test_thinking_budgets_end_where_they_do_without_speculation(
    oracle: Engine, plain_v2: Plain
) -> None:
    """vLLM applies them along draft tokens: their requests get chains."""
    reasoning = oracle.call(attrgetter("llm_engine.vllm_config.reasoning_config"))
    assert reasoning.reasoning_start_token_ids == REASONING_START
    assert reasoning.reasoning_end_token_ids == REASONING_END
    before = oracle.accepted()
    answers = tokens_of(oracle.run(small_workloads.thinking()))
    assert answers == tokens_of(plain_v2["thinking"])
    assert oracle.accepted() - before > 40
    # 4 thoughts of a budget of 6 were in the prompt.
    for request, thoughts in enumerate((0, 6, 2, 5)):
        ended = answers[request][0][thoughts:][: len(REASONING_END)]
        assert ended == REASONING_END, f"request {request}"
    assert answers[4][0].count(REASONING_END[-1]) == 2, "thinking did not start in the output"
    unbounded = tokens_of(oracle.run(small_workloads.thinking(bounded=False)))
    for request, (bounded, free) in enumerate(zip(answers, unbounded, strict=True)):
        assert (bounded != free) == (request < 5)


def test_nothing_in_the_step_waits_for_the_device(oracle: Engine) -> None:
    """Staging, sampling, walk, compaction, drafting; they are watched to the engine's end."""
    oracle.rpc(no_waiting.watch)
    oracle.run(small_workloads.EVERYTHING)
    ((calls, found),) = oracle.rpc(no_waiting.findings)
    assert calls > 10
    assert not found


def test_the_gpu_s_worker_makes_our_model_runner(oracle: Engine) -> None:
    (made,) = oracle.rpc(inside_worker.made_by_the_gpu_worker)
    assert made == [
        "vllm_redrafter.engine.v2.runner.GPUTreeModelRunner",
        "redrafter_testing.oracles.oracle_v2.OracleSpeculator",
    ]


# Families of targets

COUNT, TOKENS, K = 4, 20, 3
ALL = bool(os.environ.get("REDRAFTER_ALL_FAMILIES"))
"""In CI; by default one of each form of attention, positions and recurrent states. Experts:
../test_experts.py; images: ../test_vision.py; layers of several backends: ../test_chains.py."""
TREES = ("Gemma2For", "GPT2", "Qwen3VL")
TREES_FROM_GRAPHS = GEMMA[1:2]
CHAINS = {
    "Qwen3NextForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {"num_gpu_blocks_override": 12},
    "DeepseekV3ForCausalLM": {"num_gpu_blocks_override": 10},
}
"""With a KV cache in which some requests are preempted."""


def chosen(families: list[Family], prefixes: tuple[str, ...]) -> list[Family]:
    """The first of each prefix, or all."""
    first = [next(f for f in families if f.name.startswith(prefix)) for prefix in prefixes]
    return families if ALL else first


@pytest.mark.parametrize(
    "family",
    [
        *chosen([f for f in families_on("v2") if f not in TREES_FROM_GRAPHS], TREES),
        *TREES_FROM_GRAPHS,
    ],
    ids=lambda family: family.name,
)
def test_trees_of_other_families(family: Family, tmp_path: Path) -> None:
    """One of them with a budget and recordings for graphs."""
    require_kernel(family)
    target, drafter = family.make_pair(tmp_path)
    arguments: dict[str, Any] = {
        "max_num_batched_tokens": family.batched_tokens,  # chunks of prompts beside trees
        **family.arguments,
    }
    from_graphs = family in TREES_FROM_GRAPHS
    if from_graphs:
        arguments["max_num_seqs"] = 2  # fewer graphs
    asked = family.questions(COUNT, TOKENS)
    setup = use_triton_attention if family.is_prefix_lm else None
    with interpreted_engine(target, setup, **arguments) as plain:
        expected = plain.run(asked)
    with interpreted_engine(
        target,
        setup=recorded_graphs.use if from_graphs else None,
        attention_kernels=True,
        enforce_eager=not from_graphs,
        speculative_config={"model": str(drafter), "num_speculative_tokens": 8},
        **arguments,
    ) as llm:
        if from_graphs:
            llm.rpc(recorded_graphs.replay, True)
            llm.rpc(budgets.force, 0.8)
        assert llm.run(asked) == expected
        assert llm.accepted() > 2, "trees were hardly used"
        if from_graphs:
            recorded_graphs.assert_replayed(llm, 3, "model")


@pytest.mark.parametrize("family", chosen([*CHAINED], tuple(CHAINS)), ids=attrgetter("name"))
def test_chains_of_other_families(family: Family, tmp_path: Path) -> None:
    """Rejected at every depth, with chunks of prompts and cached prefixes; some are preempted."""
    target, drafter = family.make_pair(tmp_path)
    preempted = CHAINS.get(family.architecture, {})
    tokens = 60 if preempted else TOKENS
    # Some tokens more: the oracle has to know what is verified at an answer's end.
    more = K + 1
    longer = Questions(COUNT, tokens + more)
    with interpreted_engine(target, **family.arguments) as plain:
        answers = plain.run(longer)
    write_oracle(drafter, target, list(zip(longer.prompts(), answers, strict=True)))
    asked, expected = Questions(COUNT, tokens), [answer[:-more] for answer in answers]
    shape = {"num_speculative_tokens": K, "beam_width": 3, "beam_length": K, "context_matches": 0}
    arguments = {"max_model_len": 128, **preempted} if preempted else {}
    with interpreted_engine(
        target,
        setup=oracle_v2.use,
        attention_kernels=True,
        speculative_config={"model": str(drafter), "adaptive": False, **shape},
        max_num_batched_tokens=family.batched_tokens,
        **family.arguments,
        **arguments,
    ) as llm:
        llm.rpc("reset_redrafter_stats")
        for _ in range(2):  # then what is read of prompts is cached
            assert llm.run(asked) == expected
        (stats,) = llm.rpc("redrafter_stats")
        assert 1.5 < stats["sampled_tokens"] / stats["verifications"] < K + 0.5
        assert not preempted or llm.counter("vllm:num_preemptions") > 0


def test_recurrent_layers_in_which_vllm_verifies_no_drafts_are_refused(tmp_path: Path) -> None:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    sizes = {**WITHOUT_HEAD_DIM, "hidden_size": 128, "num_experts_per_tok": 1}
    config = transformers.JambaConfig(**sizes, **layers, use_mamba_kernels=False)
    target = make_random_target(config, tmp_path / "target")
    speculative = {"method": "redrafter", "num_speculative_tokens": 3}
    with (
        pytest.raises(RuntimeError, match="no drafts in layers on Mamba1AttentionBackend here; le"),
        interpreted_engine(target, speculative_config=speculative),
    ):
        pass


def test_custom_logits_processors_act_on_every_token_of_a_chain(
    few_tokens_target: Path, few_tokens_drafter: Path
) -> None:
    """They see draft tokens as chains, so every request gets one."""
    with interpreted_engine(
        few_tokens_target,
        logits_processors=["redrafter_testing.engines.no_echo:NoEcho"],
        speculative_config={"model": str(few_tokens_drafter), "num_speculative_tokens": 8},
    ) as llm:
        answers = llm.run(few_tokens.requests("greedy", count=6))
        accepted = llm.accepted()
    for answer in answers:
        tokens = [*answer.prompt_token_ids[-2:], *answer.outputs[0].token_ids]
        assert all(a != b for a, b in zip(tokens, tokens[2:], strict=False))
    assert accepted > 4, "chains were hardly used"


@pytest.mark.parametrize("trims", [True, False])
def test_chains_from_graphs_whatever_each_step_s_budget(
    trims: bool, few_tokens_target: Path, few_tokens_drafter: Path, few_tokens_plain: Answers
) -> None:
    """Of a target that could verify trees. Through vLLM's Triton attention, which verifies chains:
    trimmed, or all or nothing."""
    setup = [recorded_graphs.use, use_triton_attention]
    with interpreted_engine(
        few_tokens_target,
        setup=setup if trims else [*setup, recorded_graphs.read_no_trimmed_batches],
        enforce_eager=False,
        max_num_seqs=2,
        max_num_batched_tokens=64,  # so many rows are profiled
        speculative_config={
            "model": str(few_tokens_drafter),
            "num_speculative_tokens": K,
            "beam_width": 3,
            "beam_length": K,
            "tree": "chain",
        },
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        llm.rpc(budgets.force, 0.8, trims)
        for sampling, expected in few_tokens_plain.items():
            assert llm.tokens(few_tokens.requests(sampling, count=2)) == expected[:2]
        assert llm.accepted() > 0
        (admitted,) = llm.rpc(budgets.admitted)
        recorded_graphs.assert_replayed(llm, 5, "model")
    several = {tuple(sorted(set(nodes))) for nodes in admitted if len(nodes) > 1}
    assert (several <= {(0,), (K,)}) != trims
