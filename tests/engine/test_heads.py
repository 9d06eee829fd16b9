# SPDX-License-Identifier: Apache-2.0
"""Heads other than Apple's, also of other packages and authors, and those that choose among
candidates, served by both engines."""

import runpy
import site
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.inside_cpu_worker import record_candidates
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs
from redrafter_testing.models.published_speculators import D, make_lstm, make_mlp
from redrafter_testing.models.tiny_models import make_reciting, make_small_target
from redrafter_testing.models.training_data import answered
from redrafter_testing.requests import few_tokens
from redrafter_testing.shared_results import made_once
from vllm_redrafter.config import FEWEST_CANDIDATES, USUAL_CANDIDATES
from vllm_redrafter.heads.selector import SelectorConfig

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"


class Head(NamedTuple):
    """A speculative config, what puts its head on an engine's path, and for what target it is."""

    name: str
    config: dict[str, Any]
    setup: list[Callable[[], object]]
    target: Path
    plain: few_tokens.Answers
    """What the target answers on a CPU without speculation."""


CHOOSING: dict[str, dict[str, int]] = {"gated": {}, "recurrent": {"candidates": 64}}
"""Heads that choose among candidates."""
LAUNCHES = {"gated, candidates": 9 + 2 * 4, "recurrent, candidates": 11 + 2 * 6}
"""Of a search of three levels; a tree is two more. Without candidates either head has others."""


wide_target = made_once(make_small_target)
"""It ranks enough tokens to choose among candidates."""


@pytest.fixture(scope="module")
def wide_plain(wide_target: Path) -> few_tokens.Answers:
    with cpu_engine(wide_target) as llm:
        return few_tokens.answers_of(llm)


@pytest.fixture(scope="module", params=["gated", "bigram", "mlp", "lstm", *LAUNCHES])
def head(
    request: pytest.FixtureRequest,
    few_tokens_target: Path,
    few_tokens_plain_on_cpu: few_tokens.Answers,
    wide_target: Path,
    wide_plain: few_tokens.Answers,
    tmp_path_factory: pytest.TempPathFactory,
) -> Head:
    name, _, chooses = request.param.partition(", ")
    config: dict[str, Any] = {"adaptive": False}
    folder, paths = tmp_path_factory.mktemp(name), list[Path]()
    target, plain = few_tokens_target, few_tokens_plain_on_cpu
    options: dict[str, Any] = {"target_layers": (1,)}
    if chooses:
        target, plain = wide_target, wide_plain
        options = {"selector": SelectorConfig(3, 16)}
        config |= {"beam_length": 3, "context_matches": 0, **CHOOSING[name]}
    if name in CHOOSING:
        asked = few_tokens.requests("greedy").prompts
        make_reciting(folder, target, list(map(answered, asked, plain["greedy"])), name, **options)
    elif name != "bigram":
        sizes = few_tokens.HIDDEN, D, few_tokens.VOCAB
        # In the form that its authors publish.
        make = make_mlp if name == "mlp" else make_lstm
        make(folder, sizes=sizes, all_names=False, safe=True)
    else:
        with patch.object(sys, "argv", ["bigram_head.py", str(target), str(folder)]):
            runpy.run_path(str(EXAMPLES / "bigram_head.py"), run_name="__main__")
        # What an installer writes for a package whose entry point is a head.
        installed = folder / "site" / "bigram-1.0.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram\nVersion: 1.0\n")
        entry = "[vllm_redrafter.heads]\nbigram = bigram_head:BigramHead\n"
        (installed / "entry_points.txt").write_text(entry)
        paths = [installed.parent, EXAMPLES]
    setup = [partial(site.addsitedir, str(path)) for path in paths]
    return Head(request.param, {"model": str(folder), **config}, setup, target, plain)


def test_the_cpu_engine_s_output_equals_plain(head: Head) -> None:
    speculative = {**head.config, "num_speculative_tokens": 8}
    with cpu_engine(head.target, setup=head.setup, speculative_config=speculative) as llm:
        llm.rpc(record_candidates)
        assert llm.tokens(few_tokens.requests("greedy")) == head.plain["greedy"]
        assert llm.accepted() > 20, "trees were hardly used"
        assert llm.tokens(few_tokens.requests("sampled")) == head.plain["sampled"]
        (counts,) = llm.rpc(attrgetter("candidates"))
    if head.name in LAUNCHES:
        usual = head.config.get("candidates", USUAL_CANDIDATES)
        assert (min(counts), max(counts)) == (FEWEST_CANDIDATES, usual)


def test_the_v2_engine_s_output_from_graphs_equals_plain(head: Head) -> None:
    count = 2
    with interpreted_engine(
        head.target,
        setup=[*head.setup, partial(recorded_graphs.use, (1, 2, 5, 10))],
        enforce_eager=False,
        compilation_config={"mode": 0},
        max_num_seqs=count,
        max_num_batched_tokens=32,
        speculative_config={**head.config, "num_speculative_tokens": 4, "beam_width": 2},
    ) as llm:
        llm.rpc(recorded_graphs.replay, True)
        assert llm.tokens(few_tokens.requests("greedy", count)) == head.plain["greedy"][:count]
        assert llm.accepted() > 3, "trees were hardly used"
        recorded_graphs.assert_replayed(llm, 5, "model", "draft")
        ((launched, _, same_on_kernels),) = llm.rpc(recorded_graphs.draft_on_kernels)
    assert same_on_kernels and launched == 2 + LAUNCHES.get(head.name, launched - 2)
