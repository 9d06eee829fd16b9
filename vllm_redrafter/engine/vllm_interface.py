# SPDX-License-Identifier: Apache-2.0
"""Whether the installed vLLM has what an engine relies on: names, parameters, abstract methods.

It is read from vLLM's files as Python compiled them: none is imported or run, which takes seconds.
`scripts/record_vllm.py` writes what is relied on into vllm_interface.json:

- `versions`: those recorded, and why what differs from the version before does not concern us.
- `cpu`, `v2`, `both`, `offline`, `serve`: by who relies on it, what each symbol is (`described`),
  in all versions, or by the version from which on it is that; null where it does not exist.
- `strict`: base classes of ours, and functions for which ours stand in and take no more arguments.
"""

import ast
import dis
import functools
import inspect
import json
import textwrap
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, Literal

from vllm_redrafter.utils.errors import ConfigError

FILE = Path(__file__).with_suffix(".json")
ISSUES = "https://github.com/vllm-redrafter/vllm-redrafter/issues"
MARK, ANNOTATE = "abstractmethod", "__annotate__"  # a decorator; Python 3.14's annotations


def check_vllm(engine: Literal["cpu", "v2"]) -> None:
    """Warn of a version not recorded; ConfigError where what the engine relies on is changed."""
    import vllm

    versions = [version.rpartition(".")[0] for version in json.loads(FILE.read_text())["versions"]]
    version, tested, seen = vllm.__version__, " and ".join(versions), "is there"
    try:
        change = first_change(Path(vllm.__file__).parents[1], engine)
    except (ImportError, OSError) as error:
        change, seen = None, f"could not be looked up ({error})"
    if change is not None:
        raise ConfigError(
            f"ReDrafter does not run on vLLM {version}: {change}. It runs on {tested}: install one "
            f"of these or, if there is one, a newer vllm-redrafter, and report this: {ISSUES}"
        )
    if not version.startswith(tuple(f"{known}." for known in versions)):
        from vllm_redrafter.engine.log import logger

        logger.warning(
            f"ReDrafter was tested on vLLM {tested}, not on {version}; what it relies on {seen}. "
            f"Please tell us how it runs: {ISSUES}"
        )


def first_change(root: Path, engine: Literal["cpu", "v2"]) -> str | None:
    """What the engine relies on and is not there, or is changed, in the vLLM below `root`.

    Raises:
        ImportError, OSError: it is not there as Python.
    """
    recorded = json.loads(FILE.read_text())
    for symbol, known in (recorded["both"] | recorded[engine]).items():
        versions = list(known.values()) if isinstance(known, dict) else [known]
        found, strict = described(root, symbol), symbol in recorded["strict"]
        fits = (
            _fits(_found(root, symbol), old, found, strict) for old in versions if old and found
        )
        if found not in versions and not any(fits):
            return (
                f"{symbol} is {found}, and was {versions[-1]}" if found else f"{symbol} is missing"
            )
    return None


def described(root: Path, symbol: str) -> str | None:
    """What `module:name` or `module:Class.member` is in the vLLM below `root`.

    A function's parameters, "class" with its own abstract methods, "module", or "value"; None where
    it does not exist.
    """
    found = _found(root, symbol)
    if not isinstance(found, CodeType):
        return found
    if found.co_flags & inspect.CO_OPTIMIZED:
        closure = tuple(map(CellType, found.co_freevars))
        return str(inspect.signature(FunctionType(found, {}, closure=closure)))
    values = (step.argval for step in dis.get_instructions(found))
    marks = [v for v in values if v == MARK or getattr(v, "co_name", ANNOTATE) != ANNOTATE]
    abstract = (method.co_name for mark, method in pairwise(marks) if mark == MARK)
    return ", ".join(["class", *(f"abstract {name}" for name in abstract)])


def _found(root: Path, symbol: str) -> CodeType | str | None:
    module, _, path = symbol.partition(":")
    code, (*owners, name) = _code(root, module), path.split(".")
    for owner in owners:
        code = code and _inner(code, owner)
    if not owners and _code(root, f"{module}.{name}"):
        return "module"
    return code and (_inner(code, name) or ("value" if _defines(code, name) else None))


@functools.lru_cache(maxsize=8)  # symbols of a module follow one another
def _code(root: Path, module: str) -> CodeType | None:
    folder = root.joinpath(*module.split(".")).parent
    spec = PathFinder.find_spec(module, [str(folder)])
    loader: Any = spec and spec.loader
    if loader is None:
        return None
    if (code := loader.get_code(module)) is None:
        raise ImportError(f"{loader.path} is not Python")
    return code


def _inner(code: CodeType, name: str) -> CodeType | None:
    return next((inner for inner in _inner_codes(code) if inner.co_name == name), None)


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _defines(code: CodeType, name: str) -> bool:
    """Whether a module or class assigns or annotates a name, or a method an attribute."""
    annotations = _inner(code, ANNOTATE) or code
    return name in (*code.co_consts, *annotations.co_consts) or any(
        step.argval == name and step.opname in ("STORE_NAME", "STORE_ATTR")
        for body in (code, *_inner_codes(code))
        if name in body.co_names
        for step in dis.get_instructions(body)
    )


def _fits(code: Any, old: str, found: str, strict: bool) -> bool:
    """Whether what is changed may be used as before."""
    before, now = ([part for part in s.strip("()").split(", ") if part] for s in (old, found))
    added = set(now) - set(before)
    if strict and added:
        return False
    if old.startswith("class"):
        return found.startswith("class")
    by_position = next((i for i, name in enumerate(before) if name[0] == "*"), len(before))
    return (
        found[0] == "("
        and [name for name in now if name not in added] == before
        and now[:by_position] == before[:by_position]
        and not added & _required(code)
    )


def _required(code: CodeType) -> set[str]:
    """The parameters without a default, which the source alone tells."""
    lines = Path(code.co_filename).read_text().splitlines(keepends=True)
    source = "".join(inspect.getblock(lines[code.co_firstlineno - 1 :]))
    tree = ast.parse("if True:\n" + textwrap.indent(source, " ", lambda line: True))
    given = next(node for node in ast.walk(tree) if isinstance(node, ast.arguments))
    positional = [*given.posonlyargs, *given.args]
    required = positional[: len(positional) - len(given.defaults)]
    by_name = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return {a.arg for a in (*required, *(arg for arg, default in by_name if default is None))}
