# SPDX-License-Identifier: Apache-2.0
"""Every family of targets is answered for as by plain Model Runner V2, greedily and with seeds."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import budgets
from redrafter_testing.engines.interpreted_engine import interpreted_engine, use_triton_attention
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.families import families_on
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.families.gemma import GEMMA
from redrafter_testing.models.families.quantised import require_kernel
from redrafter_testing.models.tiny_models import make_drafter

pytestmark = pytest.mark.engine

COUNT, TOKENS = 4, 20
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.mark.parametrize("family", families_on("v2"), ids=lambda family: family.name)
def test_output_equals_plain(family: Family, tmp_path: Path) -> None:
    require_kernel(family)
    target = family.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", family.vocab_size, family.hidden_size)
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": family.batched_tokens,  # chunks of prompts beside trees
        **family.arguments,
    }
    speculative = {
        "model": str(drafter),
        "num_speculative_tokens": 10,
        "beam_width": 5,
        "beam_length": 4,
    }
    asked = family.questions(COUNT, TOKENS)
    setup = use_triton_attention if family.is_prefix_lm else None
    with interpreted_engine(target, setup, **arguments) as plain:
        expected = plain.run(asked)
    with interpreted_engine(target, speculative_config=speculative, **arguments) as llm:
        assert llm.run(asked) == expected
        assert llm.counter(ACCEPTED) > 5, "trees were hardly used"


@pytest.mark.parametrize("family", GEMMA[1:3], ids=lambda family: family.name)
def test_output_equals_plain_from_graphs_whatever_each_step_s_budget(
    family: Family, tmp_path: Path
) -> None:
    """Recordings stand for graphs. Of experts: test_experts.py; of M-RoPE: ../test_vision.py."""
    target = family.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", family.vocab_size, family.hidden_size)
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": family.batched_tokens,
        **family.arguments,
    }
    arguments |= {"max_num_seqs": 2}  # fewer graphs
    asked = family.questions(COUNT, TOKENS)
    setup = use_triton_attention if family.is_prefix_lm else None
    with interpreted_engine(target, setup, **arguments) as plain:
        expected = plain.run(asked)
    with interpreted_engine(
        target,
        setup=recorded_graphs.use,
        enforce_eager=False,
        speculative_config={"model": str(drafter), "num_speculative_tokens": 8},
        **arguments,
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        llm.rpc(budgets.force, 0.8)
        assert llm.run(asked) == expected
        assert llm.counter(ACCEPTED) > 2, "trees were hardly used"
        (replayed,) = llm.rpc(recorded_graphs.how_often_replayed)
    assert replayed.get("model", 0) > 3, replayed
