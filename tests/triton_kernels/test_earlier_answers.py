# SPDX-License-Identifier: Apache-2.0
"""Paths from earlier answers on the device are the reference's, whatever was entered before."""

from collections.abc import Sequence
from math import prod
from random import Random

import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.earlier_answers import slow_earlier, slow_merged
from redrafter_testing.gpu import torch_drafting
from vllm_redrafter.tree.context_matches import MATCH_CLASSES
from vllm_redrafter.triton_kernels.earlier_answers import AnswerStore, enter_answers, find_earlier
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers, find_matches

VOCAB = 3
"""Token 3 follows no match, and ends paths."""
PLACES, ROOM, SLOTS = 128, 256, 4
Tokens = Sequence[int]


def new_store(newest: int, device: torch.device, seed: int = 0) -> AnswerStore:
    shapes = (SLOTS, ROOM), (SLOTS,), (2, SLOTS + 1)
    texts = tuple(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
    return AnswerStore.empty(texts, (newest, PLACES), seed)


def write(store: AnswerStore, texts: Sequence[tuple[Tokens, int]], prompts: Tokens) -> Tensor:
    """Texts by slot, from the last one down; behind each stands what would match. Returns slots."""
    slots = torch.arange(SLOTS - 1, SLOTS - 1 - len(texts), -1, device=store.text.device)
    for slot, (text, partition), prompt in zip(slots.tolist(), texts, prompts, strict=True):
        store.text[slot] = torch.tensor([*text, *(text or [0]) * ROOM][:ROOM])
        store.num_tokens[slot] = len(text)
        store.origins[:, slot] = torch.tensor([partition, prompt])
    return slots


def drawn_tokens(draw: Random, most: int) -> list[int]:
    """Of few different tokens, or of a period."""
    size, tokens = draw.randint(0, most), draw.choice(["01", "0122", "012233"])
    period = [int(draw.choice(tokens)) for _ in range(draw.choice([2, 5, most]))]
    return (period * size)[:size]


@pytest.mark.parametrize(("num_paths", "path_length"), [(2, 8), (3, 4)])
@pytest.mark.parametrize("seed", range(50))
def test_the_best_paths_after_any_history_are_the_reference_s(
    device: torch.device, num_paths: int, path_length: int, seed: int
) -> None:
    """Several answers in a launch, more than the ring holds, some longer than it or than a tile."""
    draw = Random(seed)
    newest, longest = draw.choice([3, 30]), draw.choice([10, 30, 80, ROOM - 3])
    store = new_store(newest, device, draw.getrandbits(32))
    answers: list[tuple[Tokens, int]] = []
    for _ in range(draw.randint(1, 8)):
        count = draw.randint(1, SLOTS)
        launch = [(drawn_tokens(draw, longest), draw.choice([0, 0, 1, -1])) for _ in range(count)]
        prompts = [draw.randint(0, 3) for _ in launch]
        texts = [([2] * n + answer, of) for n, (answer, of) in zip(prompts, launch, strict=True)]
        enter_answers(write(store, texts, prompts).int(), store)
        answers += launch
    begun = [(answer[: draw.randint(3, 40)], of) for answer, of in draw.choices(answers, k=SLOTS)]
    texts = [(begin or [1], draw.choice([of, of, 1])) for begin, of in begun]
    slots = write(store, texts, [0] * SLOTS)
    shape = (2, MATCH_CLASSES, path_length)
    probabilities = torch.tensor([draw.randint(1, 4) / 4 for _ in range(prod(shape))]).view(shape)
    samples = torch.tensor([draw.randint(0, 1) for _ in texts])

    out = MatchBuffers(SLOTS, num_paths, path_length, ROOM, device)
    kinds = samples.float().to(device), probabilities.to(device)
    paths, ring = (num_paths, path_length), (newest, PLACES)
    for find in (find_earlier, torch_drafting.find_earlier):
        find_matches(store.text, store.num_tokens, slots, VOCAB, out)
        own = out.tokens.tolist(), out.classes.tolist()
        find(slots, *kinds, VOCAB, store, out)
        for r, (text, kind) in enumerate(zip(texts, samples.tolist(), strict=True)):
            earlier = slow_earlier(answers, ring, text, paths, VOCAB)
            expected = slow_merged((own[0][r], own[1][r]), earlier, probabilities[kind])
            assert (out.tokens[r].tolist(), out.classes[r].tolist()) == expected


def test_what_the_ring_has_overwritten_is_no_part_of_a_match(device: torch.device) -> None:
    """Newer tokens stand where an answer's first ones were, and are the same by chance."""
    store = new_store(100, device)
    begun, newer = [*range(10, 30)], [*[50] * (PLACES - 21), 10, 11]
    enter_answers(write(store, [(begun, 0), (newer, 0)], [0, 0]).int(), store)
    expected = {(10, 11, 12): 0, (11, 12, 13): 0, (12, 13, 14): 6, (11, 12, 13, 14): 6}
    assert {text: found(store, ([*text], 0))[0] for text in expected} == expected
    long = [*range(100, 100 + PLACES + 9)]
    enter_answers(write(store, [(long, 0)], [0]).int(), store)
    first = long[-(PLACES - 1)]
    assert [found(store, ([*range(n, n + 3)], 0)) for n in (first - 1, first)] == [[0], [6]]


def test_nothing_is_found_by_others_nor_of_padding_nor_after_a_clear(device: torch.device) -> None:
    """A partition's, or one below 0; an entry past the last slot; texts of two tokens."""
    store = new_store(2, device)
    enter_answers(write(store, [([4, 5, 6, 7, 8], 1)], [0]).int(), store)
    assert found(store, ([9, 4, 5, 6], 1)) == [6]
    for text, partition in (([9, 4, 5, 6], 0), ([9, 4, 5, 6], -1), ([5, 6], 1)):
        assert found(store, (text, partition)) == [0]
    assert found(store, ([9, 4, 5, 6], 1), entry=SLOTS) == [0]
    store.clear()
    assert found(store, ([9, 4, 5, 6], 1)) == [0]


def found(store: AnswerStore, text: tuple[Tokens, int], entry: int | None = None) -> list[int]:
    """The class of the one match of an entry, which holds this text if it is a slot."""
    device = store.text.device
    slots = write(store, [text], [0])
    slots = slots if entry is None else torch.tensor([entry], device=device)
    out = MatchBuffers(1, 1, 4, ROOM, device)
    kinds = torch.zeros(1, device=device), torch.ones(2, MATCH_CLASSES, 4, device=device)
    find_earlier(slots, *kinds, 1000, store, out)
    assert (out.tokens[0, 0, 0] >= 0) == (out.classes[0, 0, 0] > 0)
    return out.classes[0, :, 0].tolist()
