# SPDX-License-Identifier: Apache-2.0
"""Which tokens of an answer were drafted, and which of these were found in its own text.

vLLM's output has the tokens of each step, all but the last of which were drafted and accepted. Of
those that the engine found in the text it only has counts. But they follow from the text: they are
what it went on with before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_redrafter.config import LONGEST_PATH
from vllm_redrafter.tree.context_matches import find_matches

DRAFTED = "green"
"""The colour of tokens that were drafted and accepted."""
MATCHED = "cyan"
"""Of those that continue the text as it went on before."""


def num_matched(text: Sequence[int], step: Sequence[int], context_matches: int) -> int:
    """How many of a step's accepted tokens were found in the text; they are its first ones.

    Args:
        text: prompt and answer before the step.
        step: what it output.
        context_matches: the engine's setting of that name.
    """
    accepted = torch.tensor(step[:-1][:LONGEST_PATH])
    if not len(accepted) or not context_matches:
        return 0
    num_tokens = torch.tensor([len(text)])
    sizes = context_matches, len(accepted), max(text) + 1
    (paths,) = find_matches(torch.tensor([text]), num_tokens, *sizes).tokens
    return int((paths == accepted).cumprod(dim=1).sum(dim=1).max())


def matched_of_steps(
    prompt: Sequence[int], steps: Sequence[Sequence[int]], context_matches: int
) -> list[int]:
    """`num_matched` of each step of an answer."""
    text, found = [*prompt], []
    for step in steps:
        found.append(num_matched(text, step, context_matches))
        text += step
    return found


def colours(num_tokens: int, matched: int) -> list[str]:
    """Of a step's tokens, of which so many were found in the text; "" is the target's own."""
    return [MATCHED] * matched + [DRAFTED] * (num_tokens - 1 - matched) + [""]


def legend(context_matches: int) -> str:
    """What the colours mean, in rich's markup."""
    drafted = f"[{DRAFTED}]this colour[/] was drafted and accepted"
    found = f"; [{MATCHED}]this one[/] was found in the text before, and accepted"
    return drafted + found if context_matches else drafted
