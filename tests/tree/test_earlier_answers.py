# SPDX-License-Identifier: Apache-2.0
"""Continuations found in earlier answers; `drafting/test_earlier_answers.py` has many more."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter_testing.algorithm.earlier_answers import ANSWERS, TEXTS, found_earlier
from vllm_redrafter.tree.context_matches import LENGTH_CLASSES, MATCH_CLASSES, ContextMatches
from vllm_redrafter.tree.earlier_answers import entered, merged, num_places


def test_the_longest_and_of_these_the_newest_places_are_followed_to_their_answer_s_end() -> None:
    answers = [([7, 1, 2, 3, 4, 5, 6], 0), ([1, 2, 3, 5, 9], 0), ([1, 2, 3, 5, 4, 8], 0)]
    answers += [([7, 1, 2, 3, 8], 1), ([7, 1, 2, 3, 8], -1), ([2, 3, 8], 0), ([1, 2, 3, 9], 0)]
    texts = [([7, 1, 2, 3], 0), ([7, 1, 2, 3], 1), ([7, 1, 2, 3], -1), ([2, 3], 0)]
    found = found_earlier(entered(answers, 9, 64), texts, (2, 3), vocab_size=9)
    assert found.tokens[0].tolist() == [[4, 5, 6], [5, 4, 8]]
    assert found.tokens[1].tolist() == [[8, -1, -1], [-1] * 3]
    of_length = (found.classes[:, :, 0] - 1) % LENGTH_CLASSES + 1
    assert of_length.masked_fill(found.classes[:, :, 0] == 0, 0).tolist() == [
        [7, 6],
        [7, 0],
        [0, 0],
        [0, 0],
    ]
    cut = found_earlier(entered(answers, 9, 64), texts, (1, 3), vocab_size=5)
    assert cut.tokens[0].tolist() == [[4, -1, -1]]


@settings(max_examples=50, deadline=None)
@given(ANSWERS, TEXTS, st.integers(0, 2))
def test_answers_of_other_partitions_change_nothing(
    answers: list[tuple[list[int], int]], texts: list[tuple[list[int], int]], own: int
) -> None:
    texts = [(text, own) for text, _ in texts]
    others = [(a if of == own else [(t + 1) % 4 for t in a], of) for a, of in answers]
    of_two = [found_earlier(entered(a, 9, 64), texts, (2, 6), 3) for a in (answers, others)]
    assert all(torch.equal(*parts) for parts in zip(*of_two, strict=True))


def test_the_oldest_places_go_first_and_a_long_answer_keeps_its_end() -> None:
    answers = [([1, 2, 3, 4], 0), ([5, 6, 7], 0), ([5, 6, 7, 8, 9], 1), ([1, 2, 3, 4, 5], -1)]
    assert entered(answers, 5, 8).tokens.tolist() == [3, 4, -1, 5, 6, 7, 8, 9]
    assert entered(answers, 5, 8).partitions.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert entered(answers, 1, 8).tokens.tolist() == [-1, 5, 6, 7, 8, 9]
    assert entered(answers, 5, 4).tokens.tolist() == [-1, 7, 8, 9]
    sizes = [num_places(most) for most in (1, 16, 17, 4096, 1_000_000)]
    assert sizes == [4096, 4096, 8192, 1 << 20, 1 << 20]


def test_the_most_probable_paths_are_kept_own_ones_first_among_equals() -> None:
    probabilities = torch.tensor([0.2, 0.4, 0.4, 0.1, 0.1, 0.4, *[0.3] * 27])[:, None]
    assert len(probabilities) == MATCH_CLASSES

    def paths(tokens: list[list[int]], classes: list[list[int]]) -> ContextMatches:
        return ContextMatches(torch.tensor(tokens)[:, :, None], torch.tensor(classes)[:, :, None])

    own = paths([[1, 2], [1, -1]], [[1, 3], [4, 0]])
    earlier = paths([[1, 5], [1, 6]], [[6, 7], [8, 9]])
    found = merged(own, earlier, probabilities)
    assert found.tokens.tolist() == [[[2], [1]], [[1], [6]]]
    assert found.classes.squeeze(2).tolist() == [[3, 6], [8, 9]]
    none = paths([[-1, -1]] * 2, [[0, 0]] * 2)
    assert merged(own, none, probabilities).tokens.tolist() == [[[2], [1]], [[1], [-1]]]
