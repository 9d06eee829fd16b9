"""The demo's text: the standard library's functions, without prose."""

from __future__ import annotations

import ast
import logging
from itertools import islice
from pathlib import Path

from vllm_redrafter.demo.corpus import header, standard_library_functions
from vllm_redrafter.demo.target import batches_by_length


def test_functions_are_distinct_repeatable_code() -> None:
    folder = Path(logging.__file__).parent
    functions = standard_library_functions(folder)
    assert len(functions) > 200
    assert len(set(functions)) == len(functions)
    assert functions == standard_library_functions(folder)
    other_order = standard_library_functions(folder, seed=1)
    assert functions != other_order and sorted(functions) == sorted(other_order)
    for function in functions:
        (node,) = ast.parse(function).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(node) is None


def test_header_is_the_first_line() -> None:
    assert header("def f(a):\n    return a") == "def f(a):"


def test_batches_hold_every_text_once_a_pass_within_the_budget() -> None:
    texts = [[n] * (1 + n % 9) for n in range(60)]
    num_batches, seen = 0, []
    for batch in batches_by_length(texts, batch_tokens=30, seed=0):
        assert len(batch) * max(map(len, batch)) <= 30
        num_batches, seen = num_batches + 1, seen + batch
        if len(seen) == len(texts):
            break
    assert sorted(seen) == sorted(texts)
    assert num_batches < 20, "texts of one length share a batch"
    again = islice(batches_by_length(texts, batch_tokens=30, seed=0), num_batches)
    assert [text for batch in again for text in batch] == seen


def test_a_text_longer_than_the_budget_has_a_batch_of_its_own() -> None:
    assert next(batches_by_length([[0] * 50], batch_tokens=30, seed=0)) == [[0] * 50]
