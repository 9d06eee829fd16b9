# SPDX-License-Identifier: Apache-2.0
"""Drafts that choose among candidates: output equals plain, and kernels draft what torch does.

The trees that a draft builds are two launches more than its search.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.tiny_models import make_small_target
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from vllm_redrafter import new_head, save_drafter

pytestmark = pytest.mark.engine

VOCAB = 64
"""Two ranks' halves are the fewest candidates that a draft chooses from."""
SELECTOR = {"depths": 4, "rank": 8}
ONE_AT_A_TIME: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 1}
REQUESTS = few_tokens.requests("greedy", count=3)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def config_of(folder: Path) -> dict[str, Any]:
    """A random drafter's."""
    torch.manual_seed(1)
    made = new_head("gated", VOCAB, few_tokens.HIDDEN, 5, selector=SELECTOR)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_drafter(made, folder)
    config = {"model": str(folder), "num_speculative_tokens": 12, "candidates": 32}
    return config | {"context_matches": 0, "adaptive": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_target(tmp_path_factory.mktemp("target"), VOCAB, few_tokens.HIDDEN)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    with interpreted_engine(target, **ONE_AT_A_TIME) as llm:
        return single_tokens_of(llm.run(REQUESTS))


def test_output_from_graphs_equals_plain(
    target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    with interpreted_engine(
        target,
        setup=partial(recorded_graphs.use, (1, 13)),
        enforce_eager=False,
        compilation_config={"mode": 0},
        max_num_batched_tokens=64,
        speculative_config=config_of(tmp_path / "drafter"),
        **ONE_AT_A_TIME,
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        answers = single_tokens_of(llm.run(REQUESTS))
        accepted = llm.counter(ACCEPTED)
        ((launched, _, same_on_kernels),) = llm.rpc(recorded_graphs.draft_on_kernels)
    assert answers == plain
    assert accepted > 2, "trees were hardly used"
    assert same_on_kernels
    assert launched == 27


def test_output_on_two_ranks_equals_plain_on_one(
    target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    with interpreted_engine(
        target,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        tensor_parallel_size=2,
        speculative_config=config_of(tmp_path / "drafter"),
        **ONE_AT_A_TIME,
    ) as llm:
        answers = single_tokens_of(llm.run(REQUESTS))
        accepted = llm.counter(ACCEPTED)
        (rows, trees), (other_rows, other_trees) = llm.rpc(inside_worker.head_and_trees)
    assert answers == plain
    assert accepted > 2, "trees were hardly used"
    assert rows == other_rows == VOCAB // 2
    assert trees == other_trees
