# SPDX-License-Identifier: Apache-2.0
"""Targets that no tree can be verified on are known by what they are, and the log says why."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.engines.layers_of_other_backends import chunked_attention
from redrafter_testing.models.families import without_trees
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.requests import few_tokens

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def undrafted(start: Any, few_tokens_target: Path) -> Iterator[Engine]:
    """Without speculation; all layers see chunks."""
    with start(few_tokens_target, setup=chunked_attention) as llm:
        yield llm


def test_before_any_process_starts(start: Any, undrafted: Engine, tmp_path: Path) -> None:
    families = (*without_trees.CHAINS_ALONE, *without_trees.REFUSED)
    targets = [family.make(tmp_path / family.architecture) for family in families]
    drafter = make_drafter(tmp_path / "drafter", without_trees.VOCAB, without_trees.HIDDEN)
    said = undrafted.call(without_trees.start_messages, targets, drafter)
    for family, message in zip(families, said, strict=True):
        expected = f"^ReDrafter verifies chains on this target: {family.message}"
        refused = family.message if family in without_trees.REFUSED else None
        if start is cpu_engine:
            refused = without_trees.REFUSED_ON_CPUS.get(family.message, refused)
        if refused is not None:
            expected = f"{refused}.*; leave the speculative config out to run it$"
        assert re.search(expected, message), f"{family.architecture}: {message!r}"


def test_layers_of_the_loaded_target_that_read_no_trees_get_chains(
    start: Any, undrafted: Engine, few_tokens_target: Path, few_tokens_drafter: Path
) -> None:
    """Chunked attention's backend is derived from ours."""
    speculative = {"model": str(few_tokens_drafter), "num_speculative_tokens": 8}
    asked = few_tokens.requests("greedy", count=4)
    with start(
        few_tokens_target,
        setup=chunked_attention,
        speculative_config={**speculative, "adaptive": False},
    ) as llm:
        assert llm.tokens(asked) == undrafted.tokens(asked)
        assert llm.accepted() > 0
