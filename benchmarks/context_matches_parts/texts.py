"""Texts to find matches in: without repetition, of one token, and with a period."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Kind = Literal["random", "one token", "periodic"]
KINDS: tuple[Kind, ...] = get_args(Kind)

VOCAB_SIZE = 128_000
PERIOD = 16
"""Tokens until a periodic text repeats."""


def texts(kind: Kind, requests: int, tokens: int) -> npt.NDArray[Any]:
    """[requests, tokens] int32; each request has a text of its own."""
    distinct = {"random": tokens, "one token": 1, "periodic": PERIOD}[kind]
    drawn = np.random.default_rng(0).integers(VOCAB_SIZE, size=(requests, distinct), dtype=np.int32)
    return drawn[:, np.arange(tokens) % distinct]
