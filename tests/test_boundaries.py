"""Which modules may import what: the algorithm is read, tested and trained without vLLM."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_redrafter

PACKAGE = Path(vllm_redrafter.__file__).parent


def imported(source: str) -> Iterator[str]:
    """Top-level names of absolute imports, wherever they stand in the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def may_import_vllm(module: str) -> bool:
    return module == "plugin.py" or module.startswith("engine/")


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", [name for name in MODULES if not may_import_vllm(name)])
def test_vllm_is_imported_in_the_engines_and_the_plugin_alone(module: str) -> None:
    assert "vllm" not in set(imported((PACKAGE / module).read_text()))


def test_an_import_anywhere_in_a_module_is_found() -> None:
    assert "engine/offline.py" in MODULES
    assert "vllm" in set(imported((PACKAGE / "engine/offline.py").read_text()))
    assert list(imported("def f():\n    from vllm.config import X\n    import a.b")) == [
        "vllm",
        "a",
    ]
