# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the target: output with speculation equals output without."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs, torch_lora
from redrafter_testing.models.lora_adapters import ARGUMENTS, Adapted, make_adapter
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.few_tokens import Answers
from redrafter_testing.requests.tenants import Tenants, foreign_canaries, record_drafts

pytestmark = pytest.mark.engine

COUNT = 8
TWO = {**ARGUMENTS, "max_loras": 2}
KINDS = "model", "piece", "draft"


@pytest.fixture(scope="module")
def adapters(few_tokens_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("adapters")
    return tuple(make_adapter(folder / str(seed), few_tokens_target, seed) for seed in (0, 1))


@pytest.fixture(scope="module")
def speculative(few_tokens_fused_drafter: Path) -> dict[str, Any]:
    fixed = {"num_speculative_tokens": 8, "adaptive": False}
    return {"model": str(few_tokens_fused_drafter), **fixed}


def answers_of(llm: Engine, adapters: Any, without: Answers | None = None) -> Answers:
    """Of plain vLLM, which answers `without` them where a request has no adapter, they differ."""
    found = {s: llm.run(Adapted(adapters, COUNT, s)) for s in few_tokens.SAMPLING}
    for sampling, answers in (without or {}).items():
        same = [a == b for a, b in zip(found[sampling], answers, strict=True)]
        assert same == [i % 3 == 0 for i in range(COUNT)], "adapters change other answers, or none"
    return found


def test_every_request_is_answered_with_its_adapter_on_a_cpu(
    few_tokens_target: Path,
    few_tokens_plain_on_cpu: Answers,
    adapters: Any,
    speculative: dict[str, Any],
) -> None:
    with cpu_engine(few_tokens_target, **ARGUMENTS) as plain:
        expected = answers_of(plain, adapters, few_tokens_plain_on_cpu)
    with cpu_engine(few_tokens_target, speculative_config=speculative, **ARGUMENTS) as llm:
        assert answers_of(llm, adapters) == expected
        assert llm.accepted() > 20, "drafts were hardly used"


def test_every_request_is_answered_with_its_adapter_on_model_runner_v2(
    few_tokens_target: Path, few_tokens_plain: Answers, adapters: Any, speculative: dict[str, Any]
) -> None:
    """From graphs too: one with adapters for each size, one without vLLM's kernels for them."""
    with interpreted_engine(few_tokens_target, setup=torch_lora.use, **TWO) as plain:
        expected = answers_of(plain, adapters, few_tokens_plain)
    with interpreted_engine(
        few_tokens_target,
        setup=(recorded_graphs.use, torch_lora.use),
        enforce_eager=False,
        speculative_config=speculative,
        **TWO,
        **few_tokens.TIGHT,
    ) as llm:
        assert llm.rpc(recorded_graphs.captured) == [{"model": 2 * 5, "draft": 4}]
        llm.rpc(recorded_graphs.replay, True)
        assert llm.tokens(few_tokens.requests("greedy")) == few_tokens_plain["greedy"]
        recorded_graphs.assert_replayed(llm, 10, *KINDS)
        llm.rpc(recorded_graphs.replay, False)
        assert llm.run(Adapted(adapters, COUNT)) == expected["greedy"]
        llm.rpc(recorded_graphs.replay, True)
        assert answers_of(llm, adapters) == expected
        recorded_graphs.assert_replayed(llm, 10, *KINDS)
        assert llm.counter("vllm:num_preemptions") > 0
        assert llm.accepted() > 20, "drafts were hardly used"
        # Of an adapter's users, none is drafted what only others' answers have.
        llm.rpc(record_drafts)
        assert foreign_canaries(llm, Tenants(100, are_one=True))[1] > 20
        assert foreign_canaries(llm, Tenants(100, adapters=adapters)) == [0, 0]
