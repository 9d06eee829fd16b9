# SPDX-License-Identifier: Apache-2.0
"""Published speculators say what their own programs say: logits of chains, and beams by those."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.triton_interpreter import import_kernels, interpreted
from redrafter_testing.models.published_speculators import (
    KINDS,
    H,
    V,
    reference_beams,
    reference_logits,
)

LAUNCHING = "heads.selector", "heads.speculators", "heads.forms", "draft_search"
import_kernels(*LAUNCHING, despite_gpu=True)

from vllm_redrafter.checkpoints.conversion import convert  # noqa: E402
from vllm_redrafter.checkpoints.reading import load_drafter  # noqa: E402
from vllm_redrafter.engine.cpu.heads.forms import packed_form  # noqa: E402
from vllm_redrafter.engine.cpu.search import search  # noqa: E402
from vllm_redrafter.engine.cpu.v1.proposer import packed  # noqa: E402
from vllm_redrafter.engine.v2.draft_search import DraftSearch  # noqa: E402
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search  # noqa: E402
from vllm_redrafter.tree.policy import SearchShape  # noqa: E402

WIDTH, REQUESTS = 4, 2


@pytest.fixture(scope="module", params=list(KINDS))
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def head(published: Path) -> Any:
    """Read in place where it is safetensors, and else converted."""
    if (published / "pytorch_model.bin").is_file():
        convert(str(published), published / "converted")
        published /= "converted"
    return load_drafter(str(published))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


def of_target(tokens: Tensor) -> Tensor:
    raise AssertionError("a speculator has its own table")


def inputs(levels: int) -> tuple[Tensor, Tensor]:
    """(hidden [R, H], tokens [R, levels])."""
    generator = torch.Generator().manual_seed(3)
    hidden = 3 * torch.randn(REQUESTS, H, generator=generator)
    return hidden, torch.randint(V, (REQUESTS, levels), generator=generator)


@torch.no_grad()
def test_logits_along_a_chain_equal_the_reference_s(published: Path, head: Any) -> None:
    levels = head.config.num_levels
    hidden, paths = inputs(levels)
    condition = head.condition(hidden)
    state = head.start(condition, head.embedding_of(of_target, 0)(paths[:, 0]))
    logits = [head.logits(condition, state, 0)]
    for depth in range(1, levels):
        embedded = head.embedding_of(of_target, depth)(paths[:, depth])
        state = head.advance(state, embedded, depth)
        logits.append(head.logits(condition, state, depth))
    expected = torch.stack(
        [reference_logits(published, *of) for of in zip(hidden, paths.tolist(), strict=True)]
    )
    assert (torch.stack(logits, 1) - expected).abs().max() < 1e-5 * expected.abs().max()


SEARCHES: dict[str, Callable[..., ExploredNodes]] = {
    "torch": lambda head, *inputs: beam_search(head, of_target, *inputs[:2], *inputs[2]),
    "CPU": lambda head, *inputs: search(packed_form(deepcopy(head), packed), of_target, *inputs),
    "CUDA": lambda head, hidden, roots, shape: DraftSearch(
        head, of_target, None, shape, REQUESTS
    ).explore(hidden, roots)[0],
}


@pytest.mark.parametrize("form", SEARCHES)
def test_four_beams_are_those_of_all_continuations(published: Path, head: Any, form: str) -> None:
    levels = head.config.num_levels
    hidden, roots = inputs(1)
    found = SEARCHES[form](head, hidden, roots[:, 0], SearchShape(WIDTH, levels))
    for request in range(REQUESTS):
        expected = reference_beams(published, hidden[request], int(roots[request]), WIDTH, levels)
        paths: list[tuple[int, ...]] = [()] * WIDTH
        for level, beams in enumerate(expected):
            tokens = found.tokens[request, level].tolist()
            above = found.back_pointers[request, level].tolist()
            paths = [(*paths[a], t) for a, t in zip(above, tokens, strict=True)]
            assert paths == [path for path, _ in beams]
            log_probs = torch.tensor([log_prob for _, log_prob in beams])
            torch.testing.assert_close(found.log_probs[request, level], log_probs)
