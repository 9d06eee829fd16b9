# SPDX-License-Identifier: Apache-2.0
"""Which accepted tokens were found in the text; `engine/cpu/test_context_matches.py` counts them in
an engine too."""

from vllm_redrafter.cli.accepted import DRAFTED, MATCHED, colours, matched_of_steps, num_matched
from vllm_redrafter.config import LONGEST_PATH


def test_accepted_tokens_are_found_until_they_leave_every_path() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1]
    assert num_matched(text, [2, 4, 9, 7, 5], context_matches=1) == 3
    # The newest place of 9 1 2 is no other first token than the older one's.
    assert num_matched([5, 1, 7, 5, 2, 8, 5], [1, 7, 6], context_matches=2) == 2
    assert num_matched([5, 1, 7, 5, 2, 8, 5], [1, 7, 6], context_matches=1) == 0
    # The last token is the target's own, whatever it is.
    assert num_matched(text, [2, 4], context_matches=1) == 1
    assert num_matched(text, [2], context_matches=1) == 0
    assert num_matched(text, [2, 4, 9], context_matches=0) == 0
    assert num_matched([1], [1] * 20, context_matches=1) == 0
    assert num_matched([1, 1], [1] * 20, context_matches=1) == LONGEST_PATH


def test_the_text_grows_by_the_steps() -> None:
    assert matched_of_steps([1], [[2], [3, 1], [2, 3, 1, 5]], context_matches=1) == [0, 0, 3]


def test_colours_stand_in_the_order_of_a_steps_tokens() -> None:
    assert colours(4, 1) == [MATCHED, DRAFTED, DRAFTED, ""]
    assert colours(1, 0) == [""]
