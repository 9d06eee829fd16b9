# SPDX-License-Identifier: Apache-2.0
"""What of vLLM this project relies on, read from its sources; as a script, records a version.

A difference or missing symbol needs a reason in `vllm_symbols.json` why it does not concern us.
"""

import argparse
import ast
import functools
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
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
    return {version: Record(**found[version]) for version in sorted(found, key=_numbers)}


def with_version(
    records: Mapping[str, Record], version: str, symbols: dict[str, str | None]
) -> dict[str, Record]:
    """The records with one more, or with one renewed; reasons that were given are kept."""
    old = records.get(version, Record({}, {}, {}))
    added = {**records, version: Record(symbols, old.differences, old.absent)}
    ordered = {v: added[v] for v in sorted(added, key=_numbers)}
    for before, later in pairwise(ordered.values()):
        known = before.symbols.keys() | later.symbols.keys()
        names = (n for n in known if before.symbols.get(n) != later.symbols.get(n))
        later.differences = {name: later.differences.get(name, "") for name in sorted(names)}
    oldest = next(iter(ordered.values()))
    oldest.differences = {}
    for record in ordered.values():
        absent = [name for name, found in record.symbols.items() if found is None]
        record.absent = {name: record.absent.get(name, "") for name in absent}
    return ordered


def unjudged(record: Record) -> list[str]:
    """The differences and missing symbols that no reason is given for."""
    reasons = [*record.differences.items(), *record.absent.items()]
    return sorted({name for name, reason in reasons if not reason.strip()})


def described(records: Mapping[str, Record], version: str) -> Iterator[str]:
    """Lines that tell what is different in a version, and why that does not concern us."""
    versions = list(records)
    record = records[version]
    yield f"vLLM {version}: {len(record.symbols)} symbols"
    if (index := versions.index(version)) > 0:
        before = records[versions[index - 1]]
        yield f"{len(record.differences)} differ from vLLM {versions[index - 1]}:"
        for name, reason in record.differences.items():
            yield f"  {name}"
            yield f"    - {before.symbols.get(name)}"
            yield f"    + {record.symbols.get(name)}"
            yield f"    {reason or 'no reason yet'}"
    yield f"{len(record.absent)} do not exist:"
    for name, reason in record.absent.items():
        yield f"  {name}"
        yield f"    {reason or 'no reason yet'}"


def version_of(root: Path) -> str:
    """The version of the vLLM below `root`, without a local part such as `+cpu`."""
    file = root / "vllm" / "_version.py"
    if not file.exists():
        sys.exit(f"{root}: there is no vllm/_version.py below it; name the folder that has vllm/")
    found = re.search(r"^__version__ = .*['\"]([\d.]+)", file.read_text(), re.MULTILINE)
    return found[1] if found else sys.exit(f"{file}: it has no __version__")


def installed_root() -> Path:
    """The folder that has the installed vLLM's package."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Record what a version of vLLM has of the symbols that we rely on, and print "
        "what is different there from the version before it."
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
    records = with_version(read_records(), version, signatures(root, names()))
    print("\n".join(described(records, version)))
    if arguments.print_only:
        return
    values = {version: asdict(record) for version, record in records.items()}
    RECORDED.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    if missing := unjudged(records[version]):
        print(f"write {len(missing)} reason(s) into {RECORDED}")


if __name__ == "__main__":
    main()
