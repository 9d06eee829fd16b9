# SPDX-License-Identifier: Apache-2.0
"""Drafts that choose among candidates: output equals plain, and kernels draft what torch does."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.tiny_models import make_small_target
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from vllm_redrafter import new_head, save_drafter

VOCAB, CANDIDATES = 64, 32


@pytest.mark.engine
def test_output_from_graphs_equals_plain(tmp_path: Path) -> None:
    target = make_small_target(tmp_path / "target", VOCAB, few_tokens.HIDDEN)
    torch.manual_seed(1)
    head = new_head("gated", VOCAB, few_tokens.HIDDEN, selector={"depths": 4, "rank": 8})
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_drafter(head, tmp_path / "drafter")
    asked = few_tokens.requests("greedy", count=3)
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 1}
    with interpreted_engine(target, **arguments) as plain:
        expected = single_tokens_of(plain.run(asked))
    with interpreted_engine(
        target,
        setup=partial(recorded_graphs.use, (1, 13)),
        enforce_eager=False,
        compilation_config={"mode": 0},
        max_num_batched_tokens=64,
        speculative_config={
            "model": str(tmp_path / "drafter"),
            "num_speculative_tokens": 12,
            "candidates": CANDIDATES,
            "context_matches": 0,
            "adaptive": False,
        },
        **arguments,
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        assert single_tokens_of(llm.run(asked)) == expected
        assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 2, "trees were hardly used"
        ((launched, _, same_on_kernels),) = llm.rpc(recorded_graphs.draft_on_kernels)
        assert same_on_kernels and launched == 27, "trees are two launches more than the search"
