# SPDX-License-Identifier: Apache-2.0
"""Continuations found on the device are those of the reference, which looks at every place."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_redrafter.tree import context_matches as reference
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
    for buffer in (out.tokens, out.lengths, out.ranks, out.followers):
        buffer.fill_(GARBAGE)
    num_tokens = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    find_matches(table.int().to(device), num_tokens.to(device), at.to(device), VOCAB, out)
    assert (out.tokens[len(at) :] == GARBAGE).all() and (out.lengths[len(at) :] == GARBAGE).all()
    return out


def assert_found(
    texts: list[list[int]], device: torch.device, num_paths: int = 2, path_length: int = 8
) -> None:
    out = find(texts, device, num_paths, path_length)
    for request, text in enumerate(texts):
        whole = torch.tensor([text])
        num_tokens = torch.tensor([len(text)])
        expected = reference.find_matches(whole, num_tokens, num_paths, path_length, VOCAB)
        assert out.tokens[request].tolist() == expected.tokens[0].tolist(), text
        assert out.lengths[request].tolist() == expected.lengths[0].tolist(), text


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several tiles, the last of which is not full."""
    monkeypatch.setattr(kernel, "TILE", 8)


def random_texts(seed: int, high: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(high, (length,), generator=generator).tolist()
        for length in (1, 2, 7, 8, 9, 10, 33, 62)
    ]


TEXTS: dict[str, Callable[[], list[list[int]]]] = {
    "of two tokens": lambda: random_texts(0, 2),
    "one token repeated": lambda: [[3] * n for n in (1, 2, 3, 6, 9, 61)],
    "periodic": lambda: [[*range(p)] * 20 for p in (1, 2, 3)] + [[7, *[1, 2, 3, 4] * 9]],
    "of 1 to 6 tokens": lambda: [[1, 2, 1, 1, 2, 1][:n] for n in range(1, 7)],
    "the vocabulary's end": lambda: [[999, 998, 999], [998, 999, 5, 998, 999], [999] * 7],
    "placeholders": lambda: [
        [1, 2, 1000, 1000, 1, 2],
        [1, 1001, 1, 4, 1001, 1],
        [1000] * 12,
        [1, 2, 3, 4, 1000, 5, 1, 2],
    ],
}


@pytest.mark.parametrize("name", TEXTS)
def test_paths_are_the_reference_s(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number and length; tiles grow with the text, so that they are not too many."""
    assert_found(TEXTS[name](), device)
    monkeypatch.setattr(kernel, "MOST_PLACES", 8)
    assert MatchBuffers(1, 2, 8, 100, device).tile == 32
    assert_found(TEXTS[name](), device, num_paths=3, path_length=3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_paths_of_any_text_are_the_reference_s(text: list[int]) -> None:
    assert_found([text], torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def test_each_request_has_the_paths_of_its_own_slot(device: torch.device) -> None:
    """One past the last slot is padding, which has none."""
    out = find([[1, 2, 1], [5, 6, 7, 5], [8, 9]], device, entries=[1, 3, 0])
    assert out.tokens[:3, 0, :3].tolist() == [[6, 7, 5], [-1] * 3, [2, 1, 2]]
    assert out.lengths[:3].tolist() == [[1, 0], [0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"text": torch.zeros(2, 20).long()}, "text"),
        ({"text": torch.zeros(2, 40).int()}, "out: was made"),
        ({"num_tokens": torch.ones(3).int()}, "num_tokens"),
        ({"entries": torch.zeros(2).int()}, "entries: must"),
        ({"entries": torch.zeros(4).long()}, "entries: 4 requests"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], named: str) -> None:
    arguments = {
        "text": torch.zeros(2, 20).int(),
        "num_tokens": torch.ones(2).int(),
        "entries": torch.zeros(2).long(),
    }
    out = MatchBuffers(3, 2, 8, 20, "cpu")
    with pytest.raises(ValueError, match=named):
        find_matches(**(arguments | changed), vocab_size=VOCAB, out=out)


@pytest.mark.parametrize(
    ("sizes", "named"), [((5, 8, 20), "5 of 8"), ((2, 9, 20), "2 of 9"), ((2, 8, 2**29), "32 bits")]
)
def test_more_than_there_is_room_for_is_refused(sizes: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MatchBuffers(1, *sizes, "cpu")
