# SPDX-License-Identifier: Apache-2.0
"""Targets that no tree can be verified on are known by what they are, and the log says why."""

import re
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import cpu_engine, interpreted_engine, layers_of_other_backends
from redrafter_testing.engines.start_messages import start_messages
from redrafter_testing.models.families.without_trees import (
    CHAINED,
    HIDDEN,
    REFUSED,
    REFUSED_ON_CPUS,
    VOCAB,
)
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of

pytestmark = pytest.mark.engine

ENGINES = pytest.mark.parametrize(
    "engine",
    [
        pytest.param((cpu_engine, cpu_engine.cpu_engine), id="cpu"),
        pytest.param((interpreted_engine, interpreted_engine.interpreted_engine), id="v2"),
    ],
)


@ENGINES
def test_before_any_process_starts(engine: tuple[Any, Any], tmp_path: Path) -> None:
    module, _ = engine
    families = (*CHAINED, *REFUSED)
    targets = [family.make(tmp_path / family.architecture) for family in families]
    drafter = make_drafter(tmp_path / "drafter", VOCAB, HIDDEN)
    said = start_messages(module.SERVER, module.ENVIRONMENT, targets, drafter)
    for family, message in zip(families, said, strict=True):
        expected = f"^ReDrafter verifies chains on this target: {family.message}"
        refused = family.message if family in REFUSED else None
        if module is cpu_engine:
            refused = REFUSED_ON_CPUS.get(family.message, refused)
        if refused is not None:
            expected = f"{refused}.*; leave the speculative config out to run it$"
        assert re.search(expected, message), f"{family.architecture}: {message!r}"


@ENGINES
def test_layers_of_the_loaded_target_that_read_no_trees_get_chains(
    engine: tuple[Any, Any], few_tokens_target: Path, few_tokens_drafter: Path
) -> None:
    _, start = engine
    change = layers_of_other_backends.chunked_attention  # derived from our backend
    speculative = {"model": str(few_tokens_drafter), "num_speculative_tokens": 8}
    asked = few_tokens.requests("greedy", count=4)
    with start(few_tokens_target, setup=change, skip_tokenizer_init=True) as plain:
        expected = single_tokens_of(plain.run(asked))
    with start(
        few_tokens_target,
        setup=change,
        skip_tokenizer_init=True,
        speculative_config={**speculative, "adaptive": False},
    ) as llm:
        assert single_tokens_of(llm.run(asked)) == expected
        assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 0
