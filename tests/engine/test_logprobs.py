# SPDX-License-Identifier: Apache-2.0
"""Each request of a batch gets the log-probabilities that it asked for, whatever the others ask."""

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import assert_logprobs_close, tokens_of
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
TOKENS = 10


def asked(*kinds: int) -> Workload:
    """A request of each kind, in one batch."""
    prompts = [few_tokens.requests("sampled").prompts[kind % 3] for kind in kinds]
    sampling = few_tokens.SAMPLING["sampled"] | {"max_tokens": TOKENS, "ignore_eos": True}
    params = [SamplingParams(**sampling, seed=kind, **ASKED[kind]) for kind in kinds]
    return Workload(prompts, params)


@pytest.mark.parametrize("engine", [cpu_engine, interpreted_engine])
def test_a_request_gets_the_logprobs_that_plain_vllm_gives_it_alone(
    engine: Any, few_tokens_target: Path, few_tokens_drafter: Path
) -> None:
    arguments = {"skip_tokenizer_init": True, "max_logprobs": -1}
    with engine(few_tokens_target, **arguments) as plain:
        alone = [plain.run(asked(kind))[0] for kind in range(len(ASKED))]
    speculative = {"model": str(few_tokens_drafter), "num_speculative_tokens": 6}
    speculative |= {"beam_width": 3, "beam_length": 4, "adaptive": False}
    with engine(few_tokens_target, speculative_config=speculative, **arguments) as llm:
        llm.rpc("reset_redrafter_stats")
        for kinds in combinations_with_replacement(range(len(ASKED)), 2):
            answers, expected = llm.run(asked(*kinds)), [alone[kind] for kind in kinds]
            assert tokens_of(answers) == tokens_of(expected), kinds
            for answer, wanted in zip(answers, expected, strict=True):
                assert_logprobs_close(answer, wanted)
        (stats,) = llm.rpc("redrafter_stats")
    assert stats["sampled_tokens"] > stats["verifications"] + 20, "little was accepted"
