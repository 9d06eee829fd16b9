# SPDX-License-Identifier: Apache-2.0
"""What of vLLM this project relies on, read from its sources, and what is recorded of it.

`scripts/record_vllm.py` records a version. A difference or missing symbol needs a reason in
`vllm_symbols.json` why it does not concern us.
"""

import ast
import functools
import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import vllm_redrafter

PACKAGE = Path(vllm_redrafter.__file__).parent
RECORDED = Path(__file__).with_name("vllm_symbols.json")
MEMBERS = Path(__file__).with_name("vllm_members.toml")


def names() -> list[str]:
    """All symbols, as `module:name` or `module:Class.member`."""
    used = {
        f"{module}:{owner}.{name}"
        for module, owners in tomllib.loads(MEMBERS.read_text()).items()
        for owner, members in owners.items()
        for name in members.split()
    }
    return sorted(used | set(imported()))


def imported() -> Iterator[str]:
    """What engine/, offline/ and plugin.py import from vLLM's modules."""
    rooms = (file for room in ("engine", "offline") for file in (PACKAGE / room).rglob("*.py"))
    for file in (PACKAGE / "plugin.py", *rooms):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                yield from (f"{node.module}:{alias.name}" for alias in node.names)


def signatures(root: Path, symbols: Iterable[str]) -> dict[str, str | None]:
    """What each symbol is in the sources below `root`; None where it does not exist."""
    return {symbol: _signature(root, symbol) for symbol in symbols}


def _signature(root: Path, symbol: str) -> str | None:
    module, _, path = symbol.partition(":")
    if (as_module := _file(root, f"{module}.{path}")) is not None and "." not in path:
        return "module" if as_module.exists() else None
    file = _file(root, module)
    if file is None:
        return None
    body: list[ast.stmt] = _parsed(file).body
    *owners, name = path.split(".")
    for owner in owners:
        found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == owner]
        if not found:
            return None
        body = found[0].body
    return _described(body, name)


def _file(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _described(body: list[ast.stmt], name: str) -> str | None:
    for node in _flattened(body):
        match node:
            case ast.FunctionDef(name=found) if found == name:
                return f"({ast.unparse(node.args)})"
            case ast.ClassDef(name=found) if found == name:
                return f"class({', '.join(ast.unparse(base) for base in node.bases)})"
            case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return ast.unparse(node.annotation)
            case ast.Assign(targets=targets):
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    return "value"
            case ast.ImportFrom(names=aliases):
                if any((alias.asname or alias.name) == name for alias in aliases):
                    return "imported"
    assigned = (
        target
        for method in body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    for target in assigned:
        if isinstance(target, ast.Attribute) and target.attr == name:
            return "attribute"
    return None


def _flattened(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those below `if` (TYPE_CHECKING) and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flattened([*node.body, *node.orelse])


@dataclass
class Record:
    """Each symbol of a version (None: missing); reasons for differences and absences."""

    symbols: dict[str, str | None]
    differences: dict[str, str]
    absent: dict[str, str]


def read_records() -> dict[str, Record]:
    """The recorded versions, the oldest first."""
    found = json.loads(RECORDED.read_text())
    return {version: Record(**found[version]) for version in sorted(found, key=numbers)}


def unjudged(record: Record) -> list[str]:
    """The differences and missing symbols that no reason is given for."""
    reasons = [*record.differences.items(), *record.absent.items()]
    return sorted({name for name, reason in reasons if not reason.strip()})


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
