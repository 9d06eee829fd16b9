# SPDX-License-Identifier: Apache-2.0
"""Are two servers' answers to a request the same?"""

from itertools import zip_longest

from soak_parts.client import Choice, Outcome
from soak_parts.requests import Request

LOG_PROB_TOLERANCE = 1e-3
"""Rounding: rows of a step are computed in another order. Tokens have no tolerance."""


def difference(request: Request, found: Outcome, plain: Outcome) -> str | None:
    """In what an answer differs from plain vLLM's; None where it does not."""
    if plain.error is not None:
        return f"plain vLLM did not answer: {plain.error}"
    for number, (ours, theirs) in enumerate(zip(found.choices, plain.choices, strict=True)):
        what = _of_choice(ours, theirs, stops="stop" in request.body)
        if what is not None:
            return f"choice {number}: {what}"
    return None


def _of_choice(ours: Choice, theirs: Choice, stops: bool) -> str | None:
    tokens = ours.tokens
    if stops:
        # The text is cut off at the string; of the tokens of the step that completed it, vLLM
        # hands on those behind it as well.
        tokens = tokens[: len(theirs.tokens)]
    if tokens != theirs.tokens:
        at = [a == b for a, b in zip_longest(tokens, theirs.tokens)].index(False)
        return f"tokens from {at} on: {tokens[at : at + 4]}, not {theirs.tokens[at : at + 4]}"
    if ours.text != theirs.text:
        return f"text {ours.text!r}, not {theirs.text!r}"
    if ours.finish != theirs.finish:
        return f"ended by {ours.finish}, not {theirs.finish}"
    pairs = zip(ours.log_probs, theirs.log_probs, strict=False)
    if len(ours.log_probs) < len(theirs.log_probs) or any(
        abs(a - b) > LOG_PROB_TOLERANCE for a, b in pairs
    ):
        return "log-probabilities"
    return None
