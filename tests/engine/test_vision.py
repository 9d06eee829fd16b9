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
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.families.vision import QWEN2_5_VL
from redrafter_testing.models.tiny_models import make_drafter

pytestmark = pytest.mark.engine

ON_CPU = {"setup": measure_briefly, "num_gpu_blocks_override": 16}
ON_V2 = {"setup": recorded_graphs.use, "enforce_eager": False, "num_gpu_blocks_override": 9}


@pytest.mark.parametrize(
    ("start", "count", "tokens", "arguments", "budget", "accepted"),
    [
        (cpu_engine, 8, 48, ON_CPU, (inside_cpu_worker.force, inside_cpu_worker.RandomPlanner), 20),
        (interpreted_engine, 4, 32, ON_V2, (budgets.force, 0.8), 5),
    ],
    ids=["cpu", "v2"],
)
def test_output_equals_plain(
    start: Any,
    count: int,
    tokens: int,
    arguments: dict[str, Any],
    budget: tuple[Any, Any],
    accepted: int,
    tmp_path: Path,
) -> None:
    """The drafter reads a layer of the target. Not Qwen3-VL: where vLLM's breakable graphs, which
    stand for pieces here, hold its forward pass, it does not forget the last image's features."""
    target, asked = QWEN2_5_VL.make(tmp_path / "target"), QWEN2_5_VL.questions(count, tokens)
    sizes = QWEN2_5_VL.vocab_size, QWEN2_5_VL.hidden_size
    drafter = make_drafter(tmp_path / "drafter", *sizes, target_layers=(1,))
    speculative = {"model": str(drafter), "num_speculative_tokens": 10}
    # An image and a text that fill a block, asked about twice: the cache has room for it.
    one = replace(asked, count=1, tokens=8)
    with start(target, **QWEN2_5_VL.arguments) as plain:
        expected, expected_of_one = plain.run(asked), plain.run(one)
        blank = plain.run(replace(asked, blank=True))
    same = [a == b for a, b in zip(expected, blank, strict=True)]
    assert same == [False, True, False, False] * (count // 2)
    with start(
        target,
        max_num_seqs=count,
        max_num_batched_tokens=96,
        speculative_config={**speculative, "beam_width": 5, "beam_length": 4},
        **QWEN2_5_VL.arguments,
        **arguments,
    ) as llm:
        llm.rpc(*budget)
        assert llm.run(asked) == expected
        assert llm.run(one) == expected_of_one
        assert llm.accepted() > accepted, "trees were hardly used"
        assert llm.counter("vllm:num_preemptions") > 0
        assert llm.counter("vllm:prefix_cache_hits") > 0
        if start is interpreted_engine:
            recorded_graphs.assert_replayed(llm, 5, "model", "piece", "draft")
