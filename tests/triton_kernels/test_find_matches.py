# SPDX-License-Identifier: Apache-2.0
"""Continuations found on the device are those of the reference, one place at a time."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.context_matches import slow_matches
from vllm_redrafter.triton_kernels import find_matches as kernel
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers, find_matches

VOCAB = 1000
GARBAGE = -77


def find(
    texts: list[list[int]],
    device: torch.device,
    num_paths: int = 2,
    path_length: int = 8,
    max_tokens: int = 64,
    entries: Iterable[int] | None = None,
) -> MatchBuffers:
    """What is found of these texts, or of the entries'; behind each stands what would match."""
    table = torch.tensor([(text + text * max_tokens)[:max_tokens] for text in texts])
    at = torch.tensor(list(range(len(texts)) if entries is None else entries))
    out = MatchBuffers(len(at) + 1, num_paths, path_length, max_tokens, device)
    for buffer in (out.tokens, out.classes, out.ranks, out.followers):
        buffer.fill_(GARBAGE)
    num_tokens = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    find_matches(table.int().to(device), num_tokens.to(device), at.to(device), VOCAB, out)
    assert (out.tokens[len(at) :] == GARBAGE).all() and (out.classes[len(at) :] == GARBAGE).all()
    return out


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several tiles, the last of which is not full."""
    monkeypatch.setattr(kernel, "TILE", 8)


# Few tokens, those at the vocabulary's end, and placeholders, which are no tokens.
tokens = st.integers(0, 2) | st.integers(VOCAB - 2, VOCAB + 1)
periodic = st.tuples(st.lists(tokens, min_size=1, max_size=4), st.integers(1, 62)).map(
    lambda drawn: (drawn[0] * 62)[: drawn[1]]
)
texts = st.lists(st.lists(tokens, min_size=1, max_size=62) | periodic, min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("num_paths", "path_length", "most_places", "tile"),
    [(2, 8, kernel.MOST_PLACES, 8), (3, 3, 12, 32)],
)
@settings(max_examples=40, deadline=None)
@given(texts=texts)
def test_paths_of_any_text_are_the_reference_s(
    device: torch.device,
    num_paths: int,
    path_length: int,
    most_places: int,
    tile: int,
    texts: list[list[int]],
) -> None:
    """Tiles grow with the text, so that they are not too many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "MOST_PLACES", most_places)
        assert MatchBuffers(1, 2, 8, 100, device).tile == tile
        out = find(texts, device, num_paths, path_length)
    for request, text in enumerate(texts):
        found = out.tokens[request].tolist(), out.classes[request].tolist()
        assert found == slow_matches(text, (num_paths, path_length), VOCAB)


def test_each_request_has_the_paths_of_its_own_slot(device: torch.device) -> None:
    """One past the last slot is padding, which has none."""
    out = find([[1, 2, 1], [5, 6, 7, 5], [8, 9]], device, entries=[1, 3, 0])
    assert out.tokens[:3, 0, :3].tolist() == [[6, 7, 5], [-1] * 3, [2, 1, 2]]
    assert out.classes[:3, :, 0].tolist() == [[1, 0], [0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("sizes", "named"), [((5, 8, 20), "5 of 8"), ((2, 9, 20), "2 of 9"), ((2, 8, 2**29), "32 bits")]
)
def test_what_does_not_fit_is_named(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MatchBuffers(1, *sizes, "cpu")
