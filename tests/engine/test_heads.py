# SPDX-License-Identifier: Apache-2.0
"""Heads other than Apple's, also of other packages and authors, served by both engines."""

import json
import runpy
import site
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.published_speculators import D, make_lstm, make_mlp
from redrafter_testing.models.tiny_models import make_reciting
from redrafter_testing.models.training_data import answered
from redrafter_testing.requests import few_tokens

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"


class Head(NamedTuple):
    """A speculative config, and what puts its head on an engine's path."""

    config: dict[str, Any]
    setup: list[Callable[[], object]]


@pytest.fixture(scope="module", params=["gated", "bigram", "mlp", "lstm"])
def head(
    request: pytest.FixtureRequest,
    few_tokens_target: Path,
    few_tokens_plain: dict[str, list[list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Head:
    folder, paths = tmp_path_factory.mktemp(request.param), list[Path]()
    if request.param == "gated":
        asked = few_tokens.requests("greedy").prompts
        rows = list(map(answered, asked, few_tokens_plain["greedy"]))
        make_reciting(folder, few_tokens_target, rows, target_layers=(1,))
    elif request.param != "bigram":
        target = json.loads((few_tokens_target / "config.json").read_text())
        sizes = target["hidden_size"], D, target["vocab_size"]
        # In the form that its authors publish.
        make = make_mlp if request.param == "mlp" else make_lstm
        make(folder, sizes=sizes, all_names=False, safe=True)
    else:
        with patch.object(sys, "argv", ["bigram_head.py", str(few_tokens_target), str(folder)]):
            runpy.run_path(str(EXAMPLES / "bigram_head.py"), run_name="__main__")
        # What an installer writes for a package whose entry point is a head.
        installed = folder / "site" / "bigram-1.0.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram\nVersion: 1.0\n")
        head = "[vllm_redrafter.heads]\nbigram = bigram_head:BigramHead\n"
        (installed / "entry_points.txt").write_text(head)
        paths = [installed.parent, EXAMPLES]
    setup = [partial(site.addsitedir, str(path)) for path in paths]
    return Head({"model": str(folder), "adaptive": False}, setup)


def test_the_cpu_engine_s_output_equals_plain(
    head: Head, few_tokens_target: Path, few_tokens_plain: dict[str, list[list[int]]]
) -> None:
    with cpu_engine(
        few_tokens_target,
        setup=head.setup,
        speculative_config={**head.config, "num_speculative_tokens": 8},
    ) as llm:
        assert llm.tokens(few_tokens.requests("greedy")) == few_tokens_plain["greedy"]
        assert llm.accepted() > 20, "trees were hardly used"


def test_the_v2_engine_s_output_from_graphs_equals_plain(
    head: Head, few_tokens_target: Path, few_tokens_plain: dict[str, list[list[int]]]
) -> None:
    count = 2
    with interpreted_engine(
        few_tokens_target,
        setup=[*head.setup, partial(recorded_graphs.use, (1, 2, 5, 10))],
        enforce_eager=False,
        compilation_config={"mode": 0},
        max_num_seqs=count,
        max_num_batched_tokens=32,
        speculative_config={**head.config, "num_speculative_tokens": 4, "beam_width": 2},
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        asked = few_tokens.requests("greedy", count)
        assert llm.tokens(asked) == few_tokens_plain["greedy"][:count]
        assert llm.accepted() > 3, "trees were hardly used"
        recorded_graphs.assert_replayed(llm, 5, "model", "draft")
        ((_, _, same_on_kernels),) = llm.rpc(recorded_graphs.draft_on_kernels)
        assert same_on_kernels
