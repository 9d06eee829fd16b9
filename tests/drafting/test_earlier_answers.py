# SPDX-License-Identifier: Apache-2.0
"""The store of answers, against looking at one place of them at a time."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.earlier_answers import (
    ANSWERS,
    TEXTS,
    Given,
    slow_earlier,
    slow_merged,
)
from vllm_redrafter.drafting.acceptance_model import MatchAcceptance
from vllm_redrafter.drafting.earlier_answers import AnswerStore
from vllm_redrafter.tree.context_matches import LENGTH_CLASSES, MATCH_CLASSES, ContextMatches

DEPTH, VOCAB_SIZE = 6, 3


def with_earlier(
    store: AnswerStore, own: ContextMatches, texts: Sequence[Given], probabilities: torch.Tensor
) -> ContextMatches:
    """Every other request samples; rows of the table are in another order."""
    size = max(len(text) for text, _ in texts) + 20
    # What stands behind a text is of other requests, and looks like a continuation.
    table = np.array([[*text, *[*text] * size][:size] for text, _ in texts], dtype=np.int32)
    rows, num_tokens = np.arange(len(texts))[::-1], np.array([len(text) for text, _ in texts])
    of = np.array([partition for _, partition in texts]), np.arange(len(texts)) % 2 > 0
    return store.with_earlier(own, (table[::-1], rows, num_tokens), *of, probabilities.numpy())


@settings(max_examples=200, deadline=None)
@given(
    ANSWERS,
    TEXTS,
    st.integers(1, 3),
    st.integers(1, 14),
    st.sampled_from([16, 64, 512]),
    st.integers(0, 2**31),
)
def test_what_is_drafted_is_the_best_of_own_paths_and_of_those_of_the_newest_answers(
    answers: list[Given],
    texts: list[Given],
    num_paths: int,
    most_answers: int,
    places: int,
    seed: int,
) -> None:
    store = AnswerStore(most_answers, VOCAB_SIZE, places)
    probabilities = torch.from_numpy(MatchAcceptance(DEPTH).probabilities)
    # Learned ones are in no order.
    random = torch.Generator().manual_seed(seed)
    probabilities = probabilities[:, torch.randperm(probabilities.shape[1], generator=random)]
    for upto in range(len(answers) + 1):
        if upto:
            store.enter(np.array(answers[upto - 1][0], dtype=np.int32), answers[upto - 1][1])
        own_first = torch.stack([torch.randperm(3, generator=random) for _ in texts])[:, :num_paths]
        own = ContextMatches(
            own_first[:, :, None].repeat(1, 1, DEPTH),
            torch.randint(0, 6, (len(texts), num_paths, 1), generator=random).repeat(1, 1, DEPTH),
        )
        found = with_earlier(store, own, texts, probabilities)
        given = answers[:upto], (most_answers, places)
        for r, text in enumerate(texts):
            earlier = slow_earlier(*given, text, (num_paths, DEPTH), VOCAB_SIZE)
            of_own = own.tokens[r].tolist(), own.classes[r].tolist()
            expected = slow_merged(of_own, earlier, probabilities[r % 2])
            assert (found.tokens[r].tolist(), found.classes[r].tolist()) == expected


def no_paths(requests: int = 1) -> ContextMatches:
    tokens = torch.full((requests, 2, DEPTH), -1)
    return ContextMatches(tokens, torch.zeros_like(tokens))


@settings(max_examples=50, deadline=None)
@given(ANSWERS, TEXTS, st.integers(0, 2))
def test_answers_of_other_partitions_change_nothing(
    answers: list[Given], texts: list[Given], own: int
) -> None:
    texts, of_two = [(text, own) for text, _ in texts], []
    others = [(a if of == own else [(t + 1) % 4 for t in a], of) for a, of in answers]
    for entered in (answers, others):
        store = AnswerStore(9, VOCAB_SIZE, 512)
        for answer, partition in entered:
            store.enter(np.array(answer, dtype=np.int32), partition)
        probabilities = torch.from_numpy(MatchAcceptance(DEPTH).probabilities)
        of_two.append(with_earlier(store, no_paths(len(texts)), texts, probabilities))
    assert all(torch.equal(*parts) for parts in zip(*of_two, strict=True))


@pytest.mark.parametrize("partition", [0, -1])
def test_a_cleared_store_and_requests_that_do_not_share_find_nothing(partition: int) -> None:
    store, probabilities = AnswerStore(4, 9), torch.full((2, MATCH_CLASSES, DEPTH), 0.5)
    store.enter(np.arange(8, dtype=np.int32), partition)
    text = [([1, 2, 3], 0)]
    first = with_earlier(store, no_paths(), text, probabilities)
    assert first.tokens[0, 0].tolist() == ([4, 5, 6, 7, -1, -1] if partition == 0 else [-1] * 6)
    store.clear()
    assert not with_earlier(store, no_paths(), text, probabilities).classes.any()


def test_a_lookup_reads_few_places_of_a_text_that_repeats() -> None:
    """The newest 32 places of one token over and over, and not the longer match before them."""
    store, probabilities = AnswerStore(4, 9), torch.full((2, MATCH_CLASSES, DEPTH), 0.5)
    store.enter(np.array([2, 1, 1, 1, 3], dtype=np.int32), 0)
    found = with_earlier(store, no_paths(), [([2, 1, 1, 1], 0)], probabilities)
    assert found.classes[0, 0].tolist() == [7, 0, 0, 0, 0, 0]
    store.enter(np.ones(40, dtype=np.int32), 0)
    found = with_earlier(store, no_paths(), [([2, 1, 1, 1], 0)], probabilities)
    # One token stands behind the newest place.
    assert (found.classes[0, 0] % LENGTH_CLASSES).tolist() == [6, 0, 0, 0, 0, 0]
