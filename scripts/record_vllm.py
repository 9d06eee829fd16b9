# SPDX-License-Identifier: Apache-2.0
"""Record what a version of vLLM has of what we rely on, and print what is different there.

    .venv/bin/python scripts/record_vllm.py FOLDER --print-only

The record is `vllm_redrafter/engine/vllm_interface.json`; its form is told in vllm_interface.py.
What we rely on is read from our sources (imports, base classes, functions that we override or
wrap), and members of vLLM's classes from `vllm_members.toml` beside this file.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import vllm_redrafter
from vllm_redrafter.engine.vllm_interface import FILE, described

PACKAGE = Path(vllm_redrafter.__file__).parent
MEMBERS = Path(__file__).with_name("vllm_members.toml")
KINDS = "both", "cpu", "v2", "offline", "serve"


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    """The files of ours that use vLLM: whose each is (of KINDS), and its tree."""
    rooms = (file for room in ("engine", "offline") for file in (PACKAGE / room).rglob("*.py"))
    return [
        (next((kind for kind in KINDS if kind in of), "both"), ast.parse(file.read_text()))
        for file in (PACKAGE / "plugin.py", *sorted(rooms))
        for of in [(*file.parts, file.stem)]
    ]


def imported(tree: ast.Module) -> Iterator[str]:
    """What a file imports from vLLM's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def symbols() -> dict[str, str]:
    """What we rely on, as `module:name` or `module:Class.member`, and who does (of KINDS)."""
    users = defaultdict[str, set[str]](set)
    for kind, tree in sources():
        for symbol in imported(tree):
            # What is imported may be a module.
            for name in (symbol, symbol.partition(":")[0], symbol.replace(":", ".")):
                users[name].add(kind)
    found = {symbol: users[symbol] for symbol in users if ":" in symbol}
    for module, owners in tomllib.loads(MEMBERS.read_text()).items():
        of_module = {owners.pop("engine")} if "engine" in owners else users[module]
        for owner, members in owners.items():
            rooms = users.get(f"{module}:{owner}") or of_module
            # Configurations and requests come to all, who need not import them.
            if module.startswith(("vllm.config.", "vllm.sampling_params")):
                rooms = {"both"}
            found |= {f"{module}:{owner}.{name}": rooms for name in members.split()}
    return {symbol: _kind(found[symbol]) for symbol in sorted(found)}


def _kind(rooms: set[str]) -> str:
    engines = rooms - {"offline", "serve"} or rooms
    return min(engines) if len(engines) == 1 else "both"


def strict(symbols: Mapping[str, str]) -> list[str]:
    """The classes that ours derive from; functions for which ours stand in, and take no more."""
    bases, methods, wrapped = set[str](), set[tuple[str, str]](), set[str]()
    for kind, tree in sources():
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        names = {symbol.partition(":")[2]: symbol for symbol in imported(tree)}
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef() if node.bases:
                    of_bases = (n for base in node.bases for n in ast.walk(base))
                    bases |= {
                        names[n.id] for n in of_bases if isinstance(n, ast.Name) and n.id in names
                    }
                    own = (n for n in node.body if isinstance(n, ast.FunctionDef) and _is_fixed(n))
                    methods |= {(kind, method.name) for method in own}
                case ast.Call(
                    func=ast.Name(id="_wrap"),
                    args=[owner, ast.Constant(value=name), ast.Name(id=ours)],
                ):
                    if _is_fixed(functions[ours]):
                        wrapped.add(f"{ast.unparse(owner).rpartition('.')[2]}.{name}")
    return [
        symbol
        for symbol, kind in symbols.items()
        for owner, _, name in [symbol.partition(":")[2].rpartition(".")]
        if symbol in bases
        or f"{owner}.{name}" in wrapped
        or (owner and name != "__init__" and {(kind, name), ("both", name)} & methods)
    ]


def _is_fixed(function: ast.FunctionDef) -> bool:
    return not (function.args.vararg or function.args.kwarg)


def with_version(
    recorded: Mapping[str, Any], version: str, found: Mapping[str, str | None]
) -> dict[str, Any]:
    """The record with one version more, or with one renewed; reasons that were given are kept."""
    kinds, versions = symbols(), sorted({*recorded["versions"], version}, key=numbers)
    known = {symbol: value for kind in KINDS for symbol, value in recorded.get(kind, {}).items()}
    changed: dict[str, Any] = {kind: {} for kind in KINDS}
    reasons: dict[str, dict[str, str]] = {v: {} for v in versions}
    for symbol, kind in kinds.items():
        was = known.get(symbol, found[symbol])
        values = {v: found[symbol] if v == version else at(was, v) for v in versions}
        since = {
            v: values[v]
            for i, v in enumerate(versions)
            if i == 0 or values[v] != values[versions[i - 1]]
        }
        changed[kind][symbol] = since if len(since) > 1 else values[version]
        for v in list(since)[1:]:
            reasons[v][symbol] = recorded["versions"].get(v, {}).get(symbol, "")
    return {"versions": reasons, "strict": strict(kinds), **changed}


def at(known: Any, version: str) -> str | None:
    """What a symbol, as recorded, is in a version."""
    if not isinstance(known, dict):
        return known
    return next(
        (
            known[v]
            for v in sorted(known, key=numbers, reverse=True)
            if numbers(v) <= numbers(version)
        ),
        None,
    )


def told(recorded: Mapping[str, Any], version: str) -> Iterator[str]:
    """Lines that tell what is different in a version, and why that does not concern us."""
    known = {symbol: value for kind in KINDS for symbol, value in recorded[kind].items()}
    reasons, versions = recorded["versions"][version], list(recorded["versions"])
    before = versions[max(0, versions.index(version) - 1)]
    yield f"vLLM {version}: {len(known)} symbols, {len(reasons)} differ from vLLM {before}:"
    for symbol, reason in reasons.items():
        yield f"  {symbol}"
        yield f"    - {at(known[symbol], before)}"
        yield f"    + {at(known[symbol], version)}"
        yield f"    {reason or 'no reason yet'}"
    missing = [symbol for symbol in known if at(known[symbol], version) is None]
    yield "\n  ".join([f"{len(missing)} do not exist:", *missing])


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def installed_root() -> Path:
    """The folder that has the installed vLLM's package."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def version_of(root: Path) -> str:
    """The version of the vLLM below `root`, without a local part such as `+cpu`."""
    file = root / "vllm" / "_version.py"
    if not file.exists():
        sys.exit(f"{root}: there is no vllm/_version.py below it; name the folder that has vllm/")
    found = re.search(r"^__version__ = .*['\"]([\d.]+)", file.read_text(), re.MULTILINE)
    return found[1] if found else sys.exit(f"{file}: it has no __version__")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Record what a version of vLLM has of what we rely on, and print what is "
        "different there from the version before it."
    )
    parser.add_argument(
        "root",
        type=Path,
        nargs="?",
        help="a folder that has vllm/, such as an unpacked wheel (default: the installed vLLM's)",
    )
    parser.add_argument("--print-only", action="store_true", help="do not write the record")
    arguments = parser.parse_args()
    root = arguments.root or installed_root()
    version = version_of(root)
    found = {symbol: described(root, symbol) for symbol in symbols()}
    recorded = with_version(json.loads(FILE.read_text()), version, found)
    print("\n".join(told(recorded, version)))
    if arguments.print_only:
        return
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
    if missing := [
        symbol for symbol, reason in recorded["versions"][version].items() if not reason
    ]:
        print(f"write {len(missing)} reason(s) into {FILE}")


if __name__ == "__main__":
    main()
