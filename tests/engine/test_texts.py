# SPDX-License-Identifier: Apache-2.0
"""Continuations are looked for in a request's own text alone, whatever its row held before."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import searched_texts
from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.requests import few_tokens

pytestmark = pytest.mark.engine

ENGINES = {
    "cpu": (cpu_engine, searched_texts.record_on_cpu, few_tokens.VOCAB),
    "v2": (interpreted_engine, searched_texts.record_on_v2, 0),
}
"""With what stands in a text for an embedding."""


@pytest.mark.parametrize("kind", ENGINES)
def test_rows_of_tokens_embeddings_preempted_and_aborted_requests_hold_their_own_text(
    kind: str, few_tokens_target: Path
) -> None:
    engine, record, embedding = ENGINES[kind]
    arguments: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256}
    with engine(
        few_tokens_target,
        skip_tokenizer_init=True,
        enable_prompt_embeds=True,
        speculative_config={
            "method": "redrafter",
            "num_speculative_tokens": 6,
            "adaptive": False,
        },
        num_gpu_blocks_override=11,
        **arguments,
    ) as llm:
        llm.rpc(record)
        answers = llm.call(searched_texts.run_all_kinds, 24, few_tokens.VOCAB, few_tokens.HIDDEN)
        (searched,) = llm.rpc(attrgetter("searched"))
        assert llm.counter("vllm:num_preemptions") > 0
    kinds = set()
    for request, text in searched:
        prompt, output = answers[request.split("-")[0]]
        own = [embedding] * prompt if isinstance(prompt, int) else prompt
        whole = own + output
        assert text[: len(whole)] == whole[: len(text)]
        kinds.add((type(prompt), len(text) > len(own)))
    assert kinds >= {(int, True), (list, True)}
