# SPDX-License-Identifier: Apache-2.0
"""The drafters that come with the package."""

import pytest

from redrafter_testing.own_commands import printed_by, refusal_of
from vllm_redrafter.checkpoints.reading import Checkpoint, shape_of, verifier_of
from vllm_redrafter.checkpoints.shipped import shipped_drafter, shipped_drafters
from vllm_redrafter.cli.demo.smollm2 import NAME
from vllm_redrafter.cli.demo.smollm2_target import HUB_ID
from vllm_redrafter.config import ReDrafterConfig


@pytest.mark.parametrize("name", shipped_drafters())
def test_a_folder_is_whole_and_says_nothing_of_the_machine_it_was_made_on(name: str) -> None:
    folder = shipped_drafter(name)
    config = Checkpoint.open(str(folder)).checked().values
    assert verifier_of(config)
    ReDrafterConfig(**shape_of(config))
    files = {path.name: path for path in folder.iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", "README.md"}
    for text in (files["config.json"].read_text(), files["README.md"].read_text()):
        assert "/tmp/" not in text and "/home/" not in text and "/work/" not in text


def test_the_command_lists_them_with_their_targets_or_prints_one_folder() -> None:
    assert f"{NAME} for {HUB_ID}" in printed_by("shipped")
    assert printed_by("shipped", NAME) == str(shipped_drafter(NAME))
    assert NAME in refusal_of("shipped", "other")


def test_a_name_stands_where_a_folder_may() -> None:
    by_name, by_folder = map(Checkpoint.open, (f"redrafter:{NAME}", str(shipped_drafter(NAME))))
    assert (by_name.head, by_name.weights) == (by_folder.head, by_folder.weights)
    assert "K 12, 4 beams of 4 tokens, 256 candidates" in printed_by("inspect", f"redrafter:{NAME}")
    assert "no drafter 'other' comes with this package" in refusal_of("inspect", "redrafter:other")
