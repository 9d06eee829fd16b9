# SPDX-License-Identifier: Apache-2.0
"""Targets that see images, with few blocks of the KV cache and budgets at random.

Requests are preempted and read again, images included, and trees are cut, from recorded CUDA graphs
on Model Runner V2.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import budgets, inside_cpu_worker
from redrafter_testing.engines.cpu_engine import cpu_engine, measure_briefly
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.families.vision import QWEN2_5_VL, Looking
from redrafter_testing.models.tiny_models import make_drafter

pytestmark = pytest.mark.engine


def speculative(folder: Path, target_layers: tuple[int, ...] = ()) -> dict[str, Any]:
    drafter = make_drafter(folder, QWEN2_5_VL.vocab_size, QWEN2_5_VL.hidden_size, target_layers)
    return {"model": str(drafter), "num_speculative_tokens": 10, "beam_width": 5, "beam_length": 4}


def one_of(asked: Looking) -> Looking:
    """An image and a text that fill a block, asked about twice: the cache has room for it."""
    return replace(asked, count=1, tokens=8)


def check_counters(llm: Engine, accepted: int) -> None:
    assert llm.counter("vllm:spec_decode_num_accepted_tokens") > accepted, "trees were hardly used"
    assert llm.counter("vllm:num_preemptions") > 0
    assert llm.counter("vllm:prefix_cache_hits") > 0


def test_on_cpu(tmp_path: Path) -> None:
    target = QWEN2_5_VL.make(tmp_path / "target")
    asked = QWEN2_5_VL.questions(8, 48)
    arguments: dict[str, Any] = dict(QWEN2_5_VL.arguments)
    with cpu_engine(target, **arguments) as plain:
        expected, expected_of_one = plain.run(asked), plain.run(one_of(asked))
        blank = plain.run(replace(asked, blank=True))
    assert [a == b for a, b in zip(expected, blank, strict=True)] == [False, True, False, False] * 4
    arguments |= {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 16}
    with cpu_engine(
        target,
        setup=measure_briefly,
        speculative_config=speculative(tmp_path / "drafter"),
        **arguments,
    ) as llm:
        llm.rpc(inside_cpu_worker.force, inside_cpu_worker.RandomPlanner)
        assert llm.run(asked) == expected
        assert llm.run(one_of(asked)) == expected_of_one
        check_counters(llm, accepted=20)


def test_on_model_runner_v2(tmp_path: Path) -> None:
    """The drafter reads a layer of the target. Not Qwen3-VL: where vLLM's breakable graphs, which
    stand for pieces here, hold its forward pass, it does not forget the last image's features."""
    target = QWEN2_5_VL.make(tmp_path / "target")
    asked = QWEN2_5_VL.questions(4, 32)
    arguments: dict[str, Any] = {
        **QWEN2_5_VL.arguments,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 4,  # fewer graphs
    }
    with interpreted_engine(target, **arguments) as plain:
        expected, expected_of_one = plain.run(asked), plain.run(one_of(asked))
    with interpreted_engine(
        target,
        setup=recorded_graphs.use,
        enforce_eager=False,
        num_gpu_blocks_override=9,
        speculative_config=speculative(tmp_path / "drafter", target_layers=(1,)),
        **arguments,
    ) as llm:
        llm.rpc(budgets.force, 0.8)
        assert llm.run(asked) == expected
        assert llm.run(one_of(asked)) == expected_of_one
        check_counters(llm, accepted=5)
        (replayed,) = llm.rpc(recorded_graphs.how_often_replayed)
    assert all(replayed.get(kind, 0) > 5 for kind in ("model", "piece", "draft")), replayed
