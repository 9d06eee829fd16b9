# SPDX-License-Identifier: Apache-2.0
"""Targets that verify chains, on the states and the attention that vLLM gives them: output is plain
Model Runner V2's, greedily and with seeds."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from redrafter_testing.engines import budgets
from redrafter_testing.engines.interpreted_engine import interpreted_engine, use_triton_attention
from redrafter_testing.gpu import graphs_of_chains, recorded_graphs
from redrafter_testing.models.families.chained import CHAINED
from redrafter_testing.models.families.family import Family, Questions
from redrafter_testing.models.tiny_models import make_drafter, make_random_target
from redrafter_testing.oracles import oracle_v2
from redrafter_testing.oracles.oracle import write_oracle
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

COUNT, TOKENS, K = 4, 20, 3
SHAPE = {"num_speculative_tokens": K, "beam_width": 3, "beam_length": K, "adaptive": False}


def accepted_per_step(llm: Any) -> float:
    """Tokens of a verification, its own included."""
    (stats,) = llm.rpc("redrafter_stats")
    assert stats["verifications"] > 10
    return float(stats["sampled_tokens"] / stats["verifications"])


@pytest.mark.parametrize("family", CHAINED, ids=lambda family: family.name)
def test_output_equals_plain(family: Family, tmp_path: Path) -> None:
    """With rejections at every depth, chunks of prompts, prefixes from the cache."""
    target = family.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", family.vocab_size, family.hidden_size)
    asked = family.questions(COUNT, TOKENS)
    # Some tokens more: the oracle has to know what is verified at an answer's end.
    longer = Questions(COUNT, TOKENS + K + 1)
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, **family.arguments}
    with interpreted_engine(target, **arguments) as plain:
        expected = plain.run(asked)
        known = list(zip(longer.prompts(), plain.run(longer), strict=True))
    speculative = {"model": str(drafter), **SHAPE}
    arguments["max_num_batched_tokens"] = family.batched_tokens
    with interpreted_engine(
        target, speculative_config=speculative, enable_prefix_caching=False, **arguments
    ) as llm:
        llm.rpc("reset_redrafter_stats")
        assert llm.run(asked) == expected
        assert accepted_per_step(llm) > 1.0
    write_oracle(drafter, target, known)
    with interpreted_engine(
        target,
        setup=oracle_v2.use,
        speculative_config={**speculative, "context_matches": 0},
        **arguments,
    ) as llm:
        llm.rpc("reset_redrafter_stats")
        for _ in range(2):  # then what is read of prompts is cached
            assert llm.run(asked) == expected
        assert 1.5 < accepted_per_step(llm) < K + 0.5


@pytest.mark.parametrize(
    ("architecture", "blocks"), [("GraniteMoeHybridForCausalLM", 12), ("DeepseekV3ForCausalLM", 10)]
)
def test_output_equals_plain_where_requests_are_preempted(
    architecture: str, blocks: int, tmp_path: Path
) -> None:
    (family,) = (f for f in CHAINED if f.architecture == architecture)
    target = family.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", family.vocab_size, family.hidden_size)
    asked = family.questions(COUNT, 60)
    with interpreted_engine(target, skip_tokenizer_init=True) as plain:
        expected = plain.run(asked)
    with interpreted_engine(
        target,
        skip_tokenizer_init=True,
        speculative_config={"model": str(drafter), **SHAPE},
        num_gpu_blocks_override=blocks,
        max_model_len=128,
    ) as llm:
        assert llm.run(asked) == expected
        assert llm.counter("vllm:num_preemptions") > 0
        assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("sampling", few_tokens.SAMPLING)
def test_output_of_chains_that_are_asked_for_equals_plain(
    sampling: str,
    few_tokens_target: Path,
    few_tokens_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
) -> None:
    """Of a target that could verify trees; not all requests fit into the KV cache to their end."""
    speculative = {"model": str(few_tokens_drafter), **SHAPE, "tree": "chain"}
    with interpreted_engine(
        few_tokens_target,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        max_num_batched_tokens=120,
        num_gpu_blocks_override=12,
    ) as llm:
        llm.rpc("reset_redrafter_stats")
        answers = single_tokens_of(llm.run(few_tokens.requests(sampling)))
        assert answers == few_tokens_plain[sampling]
        assert accepted_per_step(llm) > 1.1
        assert llm.counter("vllm:num_preemptions") > 0


def test_recurrent_layers_in_which_vllm_verifies_no_drafts_are_refused(tmp_path: Path) -> None:
    config = transformers.JambaConfig(
        vocab_size=24,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        use_mamba_kernels=False,
    )
    target = make_random_target(config, tmp_path / "target")
    with (
        pytest.raises(
            RuntimeError, match="no drafts in layers on Mamba1AttentionBackend here; lea"
        ),
        interpreted_engine(
            target,
            skip_tokenizer_init=True,
            speculative_config={"method": "redrafter", "num_speculative_tokens": 3},
        ),
    ):
        pass


@pytest.mark.parametrize(
    ("setup", "trims"),
    [(graphs_of_chains.use, True), (graphs_of_chains.use_without_trims, False)],
    ids=["trimmed", "all or nothing"],
)
def test_output_equals_plain_whatever_each_step_s_budget(
    setup: Any, trims: bool, few_tokens_target: Path, few_tokens_drafter: Path
) -> None:
    asked = few_tokens.requests("greedy", count=2)
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,  # so many rows are profiled
    }
    with interpreted_engine(few_tokens_target, setup=use_triton_attention, **arguments) as plain:
        expected = single_tokens_of(plain.run(asked))
    speculative = {"model": str(few_tokens_drafter), **SHAPE, "tree": "chain", "adaptive": True}
    with interpreted_engine(
        few_tokens_target,
        setup=setup,
        enforce_eager=False,
        speculative_config=speculative,
        **arguments,
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        llm.rpc(budgets.force, 0.8, trims)
        llm.rpc("reset_redrafter_stats")
        assert single_tokens_of(llm.run(asked)) == expected
        assert accepted_per_step(llm) > 1.0
        (admitted,) = llm.rpc(budgets.admitted)
        (replayed,) = llm.rpc(recorded_graphs.how_often_replayed)
    assert replayed.get("model", 0) > 5, replayed
    several = {tuple(sorted(set(nodes))) for nodes in admitted if len(nodes) > 1}
    assert (several <= {(0,), (K,)}) != trims
