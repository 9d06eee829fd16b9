# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, each with some of the target's layers: output equals plain's on one."""

import dataclasses
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.v1.worker.gpu.pp_utils import PPHandler

from redrafter_testing.engines import front_end, inside_worker, layers_of_other_backends
from redrafter_testing.engines.forked_engine import (
    Engine,
    Setup,
    reset_prefix_cache,
    run_with_aborts,
)
from redrafter_testing.engines.interpreted_engine import ENVIRONMENT, interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.tiny_models import make_drafter, make_small_target
from redrafter_testing.oracles.oracle_v2 import schedule_asynchronously
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from redrafter_testing.requests.few_tokens import Answers, conversations, opening
from redrafter_testing.shared_results import made_once
from vllm_redrafter.engine.v2 import pipeline
from vllm_redrafter.utils.errors import ConfigError

# Prompts are read in chunks; of second answers, not all fit into the KV cache to their end.
TIGHT = {"max_num_batched_tokens": 120, "num_gpu_blocks_override": 14, "max_model_len": 192}


target = made_once(make_small_target, few_tokens.VOCAB, few_tokens.HIDDEN, layers=3)
"""A stage for each layer."""
fused_drafter = made_once(make_drafter, few_tokens.VOCAB, few_tokens.HIDDEN, target_layers=(1, 2))
"""Reads what the first and the second stage return."""


@pytest.fixture(scope="module")
def plain(target: Path) -> Answers:
    with interpreted_engine(target) as llm:
        return conversations(llm)


def stages(
    number: int,
    target: Path,
    drafter: Path,
    shape: Mapping[str, Any] = {"num_speculative_tokens": 8},
    setup: Setup = schedule_asynchronously,
    **arguments: Any,
) -> AbstractContextManager[Engine]:
    return interpreted_engine(
        target,
        setup=setup,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        speculative_config={"model": str(drafter), **shape},
        pipeline_parallel_size=number,
        **arguments,
    )


@pytest.mark.engine
def test_two_stages_with_chunks_prefix_caching_preemption_and_aborts(
    target: Path, fused_drafter: Path, plain: Answers
) -> None:
    shape = {"num_speculative_tokens": 8, "context_matches": 2}
    with stages(2, target, fused_drafter, shape, **TIGHT) as llm:
        answers = llm.call(run_with_aborts, opening("greedy"), [1, 2], 12)
        for index in (0, 3):
            assert single_tokens_of([answers[index]]) == [plain["greedy, first"][index]]
        llm.rpc("reset_redrafter_stats")
        assert conversations(llm) == plain
        assert llm.counter("vllm:num_preemptions") > 0
        assert llm.counter("vllm:prefix_cache_hits") > 500
        assert llm.accepted() > 100
        earlier, last = llm.rpc("redrafter_stats")
        assert earlier["verifications"] == 0 < last["verifications"]


@pytest.mark.engine
def test_three_stages_and_reloaded_weights(
    target: Path, fused_drafter: Path, plain: Answers, tmp_path: Path
) -> None:
    drafter = shutil.copytree(fused_drafter, tmp_path / "drafter")
    with stages(3, target, drafter) as llm:
        for sampling in few_tokens.SAMPLING:
            assert llm.tokens(opening(sampling)) == plain[f"{sampling}, first"]
        before = llm.accepted()
        assert before > 20
        make_drafter(drafter, few_tokens.VOCAB, few_tokens.HIDDEN)
        with pytest.raises(RuntimeError, match=r"another head .*target_layers \(1, 2\) -> "):
            llm.rpc("reload_weights")
        shutil.copytree(fused_drafter, drafter, dirs_exist_ok=True)
        llm.rpc(inside_worker.forget_embedding)
        llm.rpc("reload_weights")
        llm.call(reset_prefix_cache)
        assert llm.tokens(opening("greedy")) == plain["greedy, first"]
        assert llm.accepted() > before + 10
        swapped = llm.rpc("redrafter_swap", str(fused_drafter))
        assert swapped == [{"drafter": str(fused_drafter)}] * 3


@pytest.mark.engine
def test_two_stages_from_graphs(target: Path, fused_drafter: Path, plain: Answers) -> None:
    """Of trees and prompts: those of the first stage give out what the second one reads."""
    shape = {"num_speculative_tokens": 8, "adaptive": False, "context_matches": 0}
    small = {"enforce_eager": False, "max_num_seqs": 4, "max_num_batched_tokens": 120}
    setup = recorded_graphs.use_as_a_gpu_with_long_contexts
    with stages(2, target, fused_drafter, shape, setup, **small) as llm:
        llm.rpc(recorded_graphs.replay, True)
        assert llm.tokens(opening("greedy")) == plain["greedy, first"]
        first, last = llm.rpc(recorded_graphs.how_often_replayed)
        assert first == {"model": last["model"]} and last.keys() == {"model", "draft"}
        assert min(last.values()) > 5


@pytest.mark.engine
def test_a_layer_without_trees_on_one_stage_gives_all_stages_chains(
    few_tokens_target: Path, few_tokens_drafter: Path, few_tokens_plain: Answers
) -> None:
    setup = layers_of_other_backends.derived_backend, schedule_asynchronously
    with stages(2, few_tokens_target, few_tokens_drafter, setup=setup) as llm:
        assert llm.tokens(few_tokens.requests("greedy", 4)) == few_tokens_plain["greedy"][:4]
        assert llm.rpc(attrgetter("model_runner.table.config.tree")) == ["chain", "chain"]


@pytest.mark.engine
def test_a_front_end_of_two_stages_of_two_ranks_each_shows_what_the_last_stage_counts(
    target: Path, fused_drafter: Path, plain: Answers
) -> None:
    found = front_end.answers_of(
        {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        target,
        fused_drafter,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
    )
    assert found["answers"]["greedy"][4:] == plain["greedy, first"]
    assert found["accepted"]["0"] > 10 and found["verified"]["0"] > 10


@pytest.mark.parametrize(
    ("unread", "expected"), [(None, [0]), (3, [0]), (2, [0]), (1, [0, 1]), (0, [0, 1, 2])]
)
def test_what_the_scheduler_has_read_is_compacted_before_a_step(
    unread: int | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three stages: it reads ahead when it is paused."""
    monkeypatch.setattr(PPHandler, "get_prev_sampled_outputs", lambda self: None)
    names = [field.name for field in dataclasses.fields(pipeline._PendingTrees)]
    handler = object.__new__(pipeline.TreePPHandler)
    handler.queue = deque(pipeline._PendingTrees(**dict.fromkeys(names)) for _ in range(3))
    handler.unread_steps = unread
    compacted: list[Any] = []
    monkeypatch.setattr(handler, "_compact", compacted.append)
    assert handler.get_prev_sampled_outputs() is None
    assert [id(step) for step in compacted] == [id(handler.queue[i]) for i in expected]


def test_layers_that_no_stage_hands_on_are_refused() -> None:
    model = nn.Module()
    model.model = EagleModelMixin()
    with pytest.raises(ConfigError, match=r"vLLM's Module does not hand them on .*--target-layers"):
        pipeline.hand_on_aux_hidden_states(model)
