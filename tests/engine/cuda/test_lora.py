# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the target on Model Runner V2: output with speculation equals output without."""

from pathlib import Path

import pytest

from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs, torch_lora
from redrafter_testing.models.lora_adapters import ARGUMENTS, Adapted, make_adapter
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from redrafter_testing.requests.tenants import Tenants, foreign_canaries, record_drafts

pytestmark = pytest.mark.engine

COUNT = 8
# Prompts are read in chunks, beside trees; not all requests fit into the KV cache to their end.
TIGHT = {"max_num_batched_tokens": 120, "num_gpu_blocks_override": 12}
TWO = {**ARGUMENTS, "max_loras": 2}


def test_every_request_is_answered_with_its_adapter(
    few_tokens_target: Path,
    few_tokens_fused_drafter: Path,
    few_tokens_plain: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    """From graphs too: one with adapters for each size, one without vLLM's kernels for them."""
    first, second = (make_adapter(tmp_path / str(seed), few_tokens_target, seed) for seed in (0, 1))
    loads = {s: Adapted((first, second), COUNT, s) for s in few_tokens.SAMPLING}
    with interpreted_engine(
        few_tokens_target, setup=torch_lora.use, skip_tokenizer_init=True, **TWO
    ) as plain:
        expected = {sampling: plain.run(load) for sampling, load in loads.items()}
    for sampling, answers in expected.items():
        same = [a == b for a, b in zip(answers, few_tokens_plain[sampling], strict=True)]
        assert same == [i % 3 == 0 for i in range(COUNT)], "adapters change other answers, or none"
    with interpreted_engine(
        few_tokens_target,
        setup=(recorded_graphs.use, torch_lora.use),
        skip_tokenizer_init=True,
        enforce_eager=False,
        speculative_config={"model": str(few_tokens_fused_drafter), "num_speculative_tokens": 8},
        **TWO,
        **TIGHT,
    ) as llm:
        assert llm.rpc(recorded_graphs.captured) == [{"model": 2 * 5, "draft": 4}]
        llm.rpc(recorded_graphs.replay, True)
        answers = single_tokens_of(llm.run(few_tokens.requests("greedy")))
        assert answers == few_tokens_plain["greedy"]
        assert_replayed(llm)
        for sampling, load in loads.items():
            llm.rpc(recorded_graphs.replay, sampling == "sampled")
            assert llm.run(load) == expected[sampling]
        assert_replayed(llm)
        assert llm.counter("vllm:num_preemptions") > 0
        assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 20, "drafts were hardly used"
        # Of an adapter's users, none is drafted what only others' answers have.
        llm.rpc(record_drafts)
        assert foreign_canaries(llm, Tenants(100, are_one=True))[1] > 20
        assert foreign_canaries(llm, Tenants(200, adapters=(first, second))) == [0, 0]


def assert_replayed(llm: Engine) -> None:
    (replayed,) = llm.rpc(recorded_graphs.how_often_replayed)
    assert all(replayed.get(kind, 0) > 10 for kind in ("model", "piece", "draft")), replayed
