"""Text that every Python installation has: the functions of its standard library."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {
    "__pycache__",
    "ctypes",
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
"""Tables, tests, and packages that distributions leave out."""


def standard_library_functions(folder: Path | None = None, seed: int = 0) -> list[str]:
    """All functions and methods, each once, without comments and docstrings, in random order.

    Prose is the hard part of source text; without it a model that trains for two minutes writes
    Python.

    Args:
        folder: where to look; the standard library if None.
        seed: of the order.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = [p for p in folder.rglob("*.py") if not SKIPPED & set(p.relative_to(folder).parts)]
    functions: dict[str, None] = {}
    for path in sorted(paths):
        functions.update(dict.fromkeys(_functions(path)))
    shuffled = sorted(functions)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def header(function: str) -> str:
    """A function's first line, `def name(arguments):`; the demo's prompts."""
    return function.partition("\n")[0]


def _functions(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            return
    yield from _functions_of(tree)


def _functions_of(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _functions_of(child)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            child.decorator_list = []
            if ast.get_docstring(child) is not None:
                child.body = child.body[1:] or [ast.Pass()]
            yield ast.unparse(child)
