# SPDX-License-Identifier: Apache-2.0
"""What a CPU takes to find a request's matches, in its own text and in earlier answers.

    python benchmarks/lookups.py --output lookups.json

Tokens are as frequent as words are (Zipf), and each look-up is of another text. Medians, in
microseconds; and MB of all that is kept, which is made for so many answers.
"""

from collections.abc import Callable
from itertools import cycle
from statistics import median
from timeit import repeat
from typing import Any

import numpy as np
from shared_parts import machine, results
from shared_parts.arguments import script_parser

from vllm_redrafter.drafting.acceptance_model import MatchAcceptance
from vllm_redrafter.drafting.earlier_answers import AnswerStore
from vllm_redrafter.drafting.own_matches import own_matches

VOCABULARY, PATHS = 49_152, (2, 8)


def own_text(texts: np.ndarray) -> dict[str, float]:
    size = np.array([texts.shape[1]])
    return {"found": times(lambda row: own_matches(texts, row, size, PATHS, VOCABULARY), texts)}


def earlier_answers(answers: np.ndarray) -> dict[str, float]:
    """Of these, requests have said the first half again."""
    store, half = AnswerStore(len(answers), VOCABULARY), np.array([answers.shape[1] // 2])
    zero, chances = np.zeros(1, dtype=np.int64), MatchAcceptance(PATHS[1]).probabilities
    own, of = own_matches(answers, zero, half, PATHS, VOCABULARY), (zero, zero > 0, chances)
    entered = times(lambda row: store.enter(answers[row[0]], 0), answers)
    found = times(lambda row: store.with_earlier(own, (answers, row, half), *of), answers)
    return {"found": found, "entered": entered, "MB": sum(a.nbytes for a in store._ring[:-2]) / 1e6}


def times(call: Callable[[Any], object], texts: np.ndarray) -> float:
    rows = cycle(np.arange(len(texts))[:, None])
    seconds = repeat(lambda: call(next(rows)), number=1, repeat=max(len(texts), 1_000))
    return round(1e6 * median(seconds), 2)


def main() -> None:
    output, record = script_parser(__doc__).parse_args().output, machine.describe(None)
    draw, cases = np.random.default_rng(0), [(own_text, 64, size) for size in (2_000, 32_000)]
    cases += [(earlier_answers, *shape) for shape in ((1, 100), (40, 250), (4_000, 250))]
    for measure, *shape in cases:
        figures = measure((draw.zipf(1.2, shape) % VOCABULARY).astype(np.int32))
        print(name := f"{measure.__name__}, {shape[0]} x {shape[1]} tokens", figures)
        record[name] = figures
    results.write(output, record)


if __name__ == "__main__":
    main()
