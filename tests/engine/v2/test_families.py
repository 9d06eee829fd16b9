"""Every family of targets is answered for as by plain Model Runner V2, greedily and with seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.interpreted_engine import interpreted_engine, use_triton_attention
from redrafter_testing.models.families import families_on
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.tiny_models import make_drafter

pytestmark = pytest.mark.engine

COUNT, TOKENS = 4, 20
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.mark.parametrize("family", families_on("v2"), ids=lambda family: family.name)
def test_output_equals_plain(family: Family, tmp_path: Path) -> None:
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
