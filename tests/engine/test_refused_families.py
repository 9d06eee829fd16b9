"""Families of targets that no tree can be verified on are refused, and the reason is given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines import cpu_engine, interpreted_engine, layers_of_other_backends
from redrafter_testing.engines.start_refusals import start_refusals
from redrafter_testing.models.families.refused import HIDDEN, REFUSED, VOCAB
from redrafter_testing.models.tiny_models import make_drafter

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
    targets = [family.make(tmp_path / family.architecture) for family in REFUSED]
    drafter = make_drafter(tmp_path / "drafter", VOCAB, HIDDEN)
    said = start_refusals(module.SERVER, module.ENVIRONMENT, targets, drafter)
    for family, message in zip(REFUSED, said, strict=True):
        expected = f"{family.message}.*; leave the speculative config out to run it$"
        assert re.search(expected, message), f"{family.architecture}: {message!r}"


@ENGINES
@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(
            layers_of_other_backends.own_backend,
            r"1 Attention on OwnBackend \('model.layers.1.self_attn.attn' the first\)",
            id="a backend of its own",
        ),
        pytest.param(
            layers_of_other_backends.chunked_attention,
            r"2 ChunkedLocalAttention on ChunkedLocalAttention_32_TreeAttentionBackend "
            r"\('model.layers.0.self_attn.attn' the first\)",
            id="a backend derived from ours",
        ),
    ],
)
def test_by_a_layer_of_the_loaded_target(
    engine: tuple[Any, Any],
    change: Any,
    found: str,
    few_tokens_target: Path,
    few_tokens_drafter: Path,
) -> None:
    _, start = engine
    speculative = {"model": str(few_tokens_drafter), "num_speculative_tokens": 8}
    refused = rf"plain attention in every layer, and this target has {found}; leave the specul"
    with (
        pytest.raises(RuntimeError, match=refused),
        start(
            few_tokens_target,
            setup=change,
            skip_tokenizer_init=True,
            speculative_config=speculative,
        ),
    ):
        pass
