# SPDX-License-Identifier: Apache-2.0
"""Every family of targets is answered for as by plain vLLM, greedily and with seeds."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine, measure_briefly
from redrafter_testing.models.families import families_on
from redrafter_testing.models.families.dense import DENSE
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.families.quantised import require_kernel
from redrafter_testing.models.tiny_models import make_drafter

pytestmark = pytest.mark.engine

COUNT, TOKENS = 6, 40
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.mark.parametrize("family", families_on("cpu"), ids=lambda family: family.name)
def test_output_equals_plain(family: Family, tmp_path: Path) -> None:
    require_kernel(family)
    target = family.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", family.vocab_size, family.hidden_size)
    arguments = {"skip_tokenizer_init": True, "max_model_len": 256, **family.arguments}
    speculative: dict[str, Any] = {
        "model": str(drafter),
        "num_speculative_tokens": 10,
        "beam_width": 5,
        "beam_length": 4,
    }
    asked = family.questions(COUNT, TOKENS)
    with cpu_engine(target, **arguments) as plain:
        expected = plain.run(asked)
        if family.blank is not None:
            assert plain.run(family.blank(COUNT, TOKENS)) != expected
    # Chunks of prompts beside trees: plain vLLM ends at a seeded request that is read in chunks.
    arguments["max_num_batched_tokens"] = 96
    fixed = {**speculative, "adaptive": False}
    with cpu_engine(target, speculative_config=fixed, **arguments) as llm:
        assert llm.run(asked) == expected
        assert llm.counter(ACCEPTED) > 8, "trees were hardly used"
    if family in DENSE[1:]:
        return  # the budget, which is the default's, sees nothing in which they differ
    with cpu_engine(
        target, setup=measure_briefly, speculative_config=speculative, **arguments
    ) as llm:
        assert llm.run(asked) == expected
