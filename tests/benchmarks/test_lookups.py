# SPDX-License-Identifier: Apache-2.0
"""benchmarks/lookups.py on few tokens; what it finds is tests/drafting's."""

import lookups
import numpy as np


def test_finding_and_entering_are_timed_and_memory_is_counted() -> None:
    texts = np.arange(40, dtype=np.int32).reshape(4, 10) % 7
    assert lookups.own_text(texts).keys() == {"found"}
    figures = lookups.earlier_answers(texts)
    assert min(figures.values()) > 0
    # Room for 4,096 places at least: of tokens, partitions, places before and two heads.
    assert figures["MB"] == (4096 * (4 + 4 + 8 + 2 * 8) + 8 * (4 + 2)) / 1e6
