# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts costs here is measured with its experts."""

from pathlib import Path

import pytest

from redrafter_testing.engines import timed_experts
from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.models.families import EXPERTS_PER_ROW, MIXTRAL
from redrafter_testing.models.tiny_models import make_drafter

pytestmark = pytest.mark.engine


def test_costs_are_those_of_different_tokens_through_several_experts(tmp_path: Path) -> None:
    target = MIXTRAL.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", MIXTRAL.vocab_size, MIXTRAL.hidden_size)
    with cpu_engine(
        target,
        setup=timed_experts.watch_cpu,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=2,
        speculative_config={"model": str(drafter), "num_speculative_tokens": 8},
    ) as llm:
        llm.rpc(timed_experts.check, {1, 4, 8, 16, 18}, EXPERTS_PER_ROW)
