# SPDX-License-Identifier: Apache-2.0
"""What a selector is in a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.models.head_forms import random_head
from vllm_redrafter.checkpoints.conversion import convert
from vllm_redrafter.checkpoints.inspection import inspect_checkpoint
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.config import USUAL_CANDIDATES
from vllm_redrafter.engine.speculative_config import Request, validated
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.utils.errors import ConfigError

V, H = 200, 16
SIZES = SelectorConfig(depths=3, rank=4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    head = random_head(new_head("recurrent", V, H, selector=SIZES).config)
    save_drafter(head, tmp_path / "drafter", "target")
    return tmp_path / "drafter"


def asked(checkpoint: Path, **more: Any) -> dict[str, Any]:
    return {"model": str(checkpoint), "num_speculative_tokens": 8, "beam_length": 4, **more}


def test_it_is_written_read_and_converted_with_its_drafter(checkpoint: Path) -> None:
    read = load_drafter(str(checkpoint))
    assert read.config.selector == SIZES and read.config.selected_depths == 3
    assert inspect_checkpoint(str(checkpoint)).checkpoint.head == read.config
    convert(str(checkpoint), checkpoint.parent / "copy")
    copy = load_drafter(str(checkpoint.parent / "copy"))
    for name, tensor in read.state_dict().items():
        assert tensor.equal(copy.state_dict()[name])


@pytest.mark.parametrize(
    ("more", "candidates"),
    [
        *(({}, USUAL_CANDIDATES), ({"candidates": 64}, 64), ({"candidates": 0}, 0)),
        # The selector is of three depths behind the first.
        ({"beam_length": 5}, 0),
    ],
)
def test_drafts_choose_among_candidates_unless_the_config_says_otherwise(
    checkpoint: Path, more: dict[str, Any], candidates: int
) -> None:
    assert validated(Request(asked(checkpoint, **more)))[0].candidates == candidates


@pytest.mark.parametrize(("recorded", "served"), [(0, 0), (32, USUAL_CANDIDATES), (64, 64)])
def test_wider_drafts_than_the_checkpoint_has_candidates_for_have_the_usual_number(
    recorded: int, served: int, tmp_path: Path
) -> None:
    shape = {"beam_width": 4, "beam_length": 3, "candidates": recorded}
    save_drafter(new_head("gated", V, H, selector=SIZES), tmp_path, "target", shape)
    for width, candidates in ((32, recorded), (33, served)):
        assert validated(Request(asked(tmp_path, beam_width=width)))[0].candidates == candidates
    with pytest.raises(ConfigError, match="between 33 and 512"):
        validated(Request(asked(tmp_path, beam_width=33, candidates=32)))


def test_candidates_that_a_head_cannot_tell_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beam_length 5 exceeds the 4 tokens .* candidates 0"):
        validated(Request(asked(checkpoint, beam_length=5, candidates=64)))
    save_drafter(new_head("gated", V, H), tmp_path / "none", "target")
    with pytest.raises(ConfigError, match=r"candidates 64, .* has no selector: add one"):
        validated(Request(asked(tmp_path / "none", candidates=64)))


@pytest.mark.parametrize(
    "wrong", [3, {"depths": 3}, {"depths": 0, "rank": 4}, {"depths": 3, "rank": 4, "more": 1}]
)
def test_entries_that_are_no_selector_are_refused(wrong: Any) -> None:
    values = {"vocab_size": V, "hidden_size": H}
    with pytest.raises(ConfigError, match="selector"):
        GatedConfig.from_dict(values | {"selector": wrong})
