# SPDX-License-Identifier: Apache-2.0
"""A drafter replaced while an engine serves: the next drafts are the new one's, answers plain's."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine, answers_between_swaps
from redrafter_testing.models.checkpoints import edit_tensors
from redrafter_testing.models.tiny_models import make_drafter, make_reciting
from redrafter_testing.models.training_data import answered
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.workloads import Workload
from vllm_redrafter import save_drafter
from vllm_redrafter.heads.registry import new_head

pytestmark = pytest.mark.engine

RANKED = 20
"""Of the target's 24 tokens: the better drafter ranks the first ones, the worse one the last."""


class Served(NamedTuple):
    workload: Workload
    plain: list[list[int]]
    better: Path
    worse: Path


@pytest.fixture(scope="module")
def served(few_tokens_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    asked = few_tokens.requests("greedy", count=4)
    for params in asked.params:
        params.max_tokens = 200  # of more steps than there are between ten swaps
    with cpu_engine(few_tokens_target) as llm:
        plain = llm.tokens(asked)
    better, worse = map(tmp_path_factory.mktemp, ("better", "worse"))
    rows = list(map(answered, asked.prompts, plain))
    make_reciting(better, few_tokens_target, rows, draft_vocab_size=RANKED)
    head = new_head("gated", few_tokens.VOCAB, few_tokens.HIDDEN, draft_vocab_size=RANKED)
    torch.nn.init.normal_(head.vocabulary_layer.weight)
    head.keep_tokens(torch.arange(few_tokens.VOCAB - RANKED, few_tokens.VOCAB))
    save_drafter(head, worse)
    return Served(asked, plain, better, worse)


@pytest.fixture(scope="module")
def llm(start: Any, few_tokens_target: Path, served: Served) -> Iterator[Engine]:
    shape = {"num_speculative_tokens": 8, "context_matches": 0, "adaptive": False}
    config = {"model": str(served.better), **shape}
    with start(few_tokens_target, speculative_config=config) as llm:
        yield llm


def test_ten_swaps_under_load_leave_answers_as_plain_and_acceptance_follows(
    llm: Engine, served: Served
) -> None:
    folders = [str(served.worse), str(served.better)] * 5
    answers, tokens = llm.call(answers_between_swaps, served.workload, folders)
    assert answers == served.plain
    assert max(tokens[::2]) < 1.5 < 2 < min(tokens[1::2])


def test_a_broken_file_is_refused_by_name_with_the_reason_and_the_old_drafter_stays(
    llm: Engine, served: Served, tmp_path: Path
) -> None:
    bias = "cell.bias"
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "missing cell.bias": lambda tensors: tensors.pop(bias),
        "cell.bias has shape": lambda tensors: tensors.update({bias: tensors[bias][1:]}),
        "cell.bias holds NaN": lambda tensors: tensors[bias][3:4].fill_(torch.nan),
        "d2t names a token of the target twice": lambda tensors: tensors["d2t"][3:4].sub_(1),
    }
    folders = {"no such folder": tmp_path / "nowhere"}
    for number, (reason, edit) in enumerate(edits.items()):
        folders[reason] = shutil.copytree(served.worse, tmp_path / str(number))
        edit_tensors(folders[reason], edit)
    other = "model_type redrafter_gated -> recurrent_drafting_drafter, draft_vocab_size 20 -> None"
    folders[other] = make_drafter(tmp_path / "other", few_tokens.VOCAB, few_tokens.HIDDEN)
    llm.rpc("redrafter_swap", str(served.better))
    for reason, folder in folders.items():
        with pytest.raises(RuntimeError) as error:
            llm.rpc("redrafter_swap", str(folder))
        for part in ("ConfigError", str(folder), reason):
            assert part in str(error.value)
    answers, (tokens,) = llm.call(answers_between_swaps, served.workload, [None])
    assert answers == served.plain and tokens > 2
