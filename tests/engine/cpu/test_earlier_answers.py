# SPDX-License-Identifier: Apache-2.0
"""Earlier answers in vLLM's CPU engine: what they bring, and who sees whose."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.tenants import Tenants, foreign_canaries, record_drafts

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=[False, True], ids=["answers", "prompts too"])
def llm(request: pytest.FixtureRequest, few_tokens_target: Path) -> Iterator[Engine]:
    """Without a drafter: all nodes are of matches. Some requests are preempted."""
    config = {
        "method": "redrafter",
        "num_speculative_tokens": 8,
        "adaptive": False,
        "earlier_prompts": request.param,
    }
    with cpu_engine(
        few_tokens_target,
        speculative_config=config,
        num_gpu_blocks_override=11,
        max_num_seqs=4,
        max_model_len=256,
    ) as engine:
        engine.rpc(record_drafts)
        yield engine


def test_what_was_asked_before_takes_fewer_steps_and_has_the_same_answer(
    llm: Engine, few_tokens_plain_on_cpu: dict[str, list[list[int]]]
) -> None:
    for name, answers in few_tokens_plain_on_cpu.items():
        steps = []
        for forgets in (True, False, True):
            if forgets:
                llm.call(reset_prefix_cache)
            llm.rpc("reset_redrafter_stats")
            assert llm.tokens(few_tokens.requests(name)) == answers
            (stats,) = llm.rpc("redrafter_stats")
            steps.append(stats["verifications"])
            assert stats["earlier_tokens"] >= stats["accepted_earlier_tokens"]
            assert forgets or stats["accepted_earlier_tokens"] > 100
        assert steps[1] < 0.7 * min(steps[0], steps[2]), name
    assert llm.counter("vllm:num_preemptions") > 0


def test_no_tenant_is_drafted_what_only_another_one_s_text_has(
    llm: Engine, request: pytest.FixtureRequest
) -> None:
    """Tenants that share see each other's answers, and prompts where that is asked for."""
    asked, answered = foreign_canaries(llm, Tenants(100, are_one=True))
    assert answered > 20 and (asked > 20 if "prompts too" in request.node.name else asked == 0)
    assert foreign_canaries(llm, Tenants(300)) == [0, 0]
