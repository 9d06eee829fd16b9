# SPDX-License-Identifier: Apache-2.0
"""Whether answers are plain vLLM's: equal, or parting from them at a near-tie."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf

CANDIDATES = 20
"""Tokens whose log-probabilities plain vLLM is asked for: its own maximum."""
NEAR = {"bfloat16": 0.25, "float32": 0.001}
"""How far two tokens' log-probabilities are apart at most, by dtype, to be a near-tie.

In bfloat16, logits from 16 to 32 are multiples of 0.125: each of the two may be rounded by one.
A target whose logits are larger may part from itself by more.
"""


@dataclass(frozen=True)
class Parting:
    """Where an answer parts from plain vLLM's: at which token (from 1), behind which prompt.

    `tokens` are plain vLLM's and the other one, None where an answer has ended. `candidates` are
    plain vLLM's most probable tokens there, with their log-probabilities.
    """

    number: int
    prompt: list[int]
    tokens: tuple[int | None, int | None]
    candidates: Sequence[tuple[int, float]] = ()

    def __str__(self) -> str:
        return f"token {self.number}, where the two tokens are {self.apart:.3g} apart"

    @property
    def apart(self) -> float:
        """How far the less probable of both tokens is from the best; infinite if no candidate."""
        known = dict[int | None, float](self.candidates)
        return max(known.values()) - min(known.get(token, -inf) for token in self.tokens)


def parting(prompt: list[int], plain: list[int], other: list[int]) -> Parting | None:
    """Where two answers to a prompt part first; None if they are equal."""
    for number, tokens in enumerate(zip_longest(plain, other), 1):
        if tokens[0] != tokens[1]:
            return Parting(number, prompt + plain[: number - 1], tokens)
    return None


def verdict(partings: Sequence[Parting | None], near: float) -> str:
    """How many answers are plain vLLM's, in words; "FAULT" if one parts at no near-tie."""
    total, apart = len(partings), [each.apart for each in partings if each is not None]
    if faults := [each for each in apart if each > near]:
        far = f"up to {max(faults):.3g} apart"
        return f"FAULT: {len(faults)} of {total} parting at no near-tie ({far})"
    ties = f", {len(apart)} parting at a near-tie (at most {max(apart):.3g} apart)" if apart else ""
    return f"{total} of {total}: {total - len(apart)} equal{ties}"
