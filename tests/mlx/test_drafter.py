# SPDX-License-Identifier: Apache-2.0
"""Binding a drafter to a model of mlx-lm."""

import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.sample_utils import make_sampler

from redrafter_testing.models.checkpoints import edit_config
from redrafter_testing.models.tiny_models import make_drafter
from vllm_redrafter.budget.planner import arms_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.mlx import load_drafter
from vllm_redrafter.utils.errors import ConfigError

FIXED: dict[str, Any] = {"adaptive": False}
SERVED = FIXED | {"earlier_answers": 0}


def test_what_is_not_said_is_the_checkpoint_s_but_at_most_eight_rows(
    pair: Any, tmp_path: Path
) -> None:
    method = {"speculative_tokens": 12, "beam_width": 3, "beam_length": 4}
    entry = {"proposal_methods": [method]}
    recording = str(make_drafter(tmp_path))
    edit_config(Path(recording), lambda values: values.update(speculators_config=entry))
    made = load_drafter(recording, pair.model, **FIXED)
    assert made.config == ReDrafterConfig(7, beam_width=3, beam_length=4, **SERVED)
    more = load_drafter(recording, pair.model, num_speculative_tokens=12, beam_width=2, **FIXED)
    assert more.config == ReDrafterConfig(12, beam_width=2, beam_length=4, **SERVED)
    assert load_drafter(pair.drafter, pair.model, **FIXED).config == ReDrafterConfig(7, **SERVED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 128}, "between 1 and 127"),
        ({"beam_wdith": 3}, "no such setting: beam_wdith"),
        ({"earlier_answers": 9}, "earlier_answers 9: in MLX no answers"),
        ({"earlier_prompts": True}, "earlier_prompts True: in MLX no answers"),
        ({"drafter": None, "context_matches": 0}, "there is nothing to verify"),
    ],
)
def test_values_out_of_range_are_refused(pair: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_drafter(**{"drafter": pair.drafter, "model": pair.model, **settings})


def test_a_drafter_of_another_target_is_refused(pair: Any, tmp_path: Path) -> None:
    other = make_drafter(tmp_path, vocab_size=400, hidden_size=64)
    with pytest.raises(
        ConfigError, match=r"hidden size is 64, the target's 128; the drafter's vocabulary size"
    ):
        load_drafter(str(other), pair.model)


def compiled_forms() -> dict[str, int]:
    """Of each compiled loop, for how many types of arguments it was compiled."""
    from numba.core.registry import CPUDispatcher

    modules = [m for name, m in sys.modules.items() if name.startswith("vllm_redrafter.")]
    loops = {f for m in modules for f in vars(m).values() if isinstance(f, CPUDispatcher)}
    return {repr(loop): len(loop.signatures) for loop in loops}


@pytest.mark.parametrize("settings", [{}, FIXED, {"tree": "chain"}])
def test_no_loop_is_compiled_while_an_answer_waits(pair: Any, settings: dict[str, Any]) -> None:
    made = load_drafter(pair.drafter, pair.model, **settings)
    before = compiled_forms()
    assert sum(before.values()) > 5
    for sampler in (None, make_sampler(1.0)):
        assert len(pair.answer(made, "list values", 30, sampler=sampler)) > 5
    assert compiled_forms() == before


@pytest.mark.parametrize("has_drafter", [True, False])
def test_every_arm_and_every_number_of_rows_has_a_cost(pair: Any, has_drafter: bool) -> None:
    made = load_drafter(pair.drafter if has_drafter else None, pair.model)
    table = made.drafting.planner.times.table  # type: ignore[attr-defined]
    for arm in arms_of(made.config, has_drafter):
        assert table.draft_seconds(1, *arm) > 0
    assert (table.verify_seconds(range(1, 9)) > 0).all()
    assert table.verify[-1][0] <= 8
