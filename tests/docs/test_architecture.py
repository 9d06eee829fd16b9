"""The figure of packages in docs/architecture.md says who imports whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TEXT = (REPO / "docs" / "architecture.md").read_text()

WIDER = {"cli": ("__main__", "cli")}
"""Boxes that stand for more modules than they name."""

NODE = r"(\w+)(?:\[\"([^\"]+)\"\])?(?::::\w+)?"


def figure() -> str:
    """The source of the packages' figure."""
    found = re.search(r"^## Packages$.*?```mermaid\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@cache
def boxes_and_arrows() -> tuple[dict[str, tuple[str, ...]], list[tuple[str, str]]]:
    """The modules that each box stands for, dotted, and the arrows between boxes."""
    labels: dict[str, str] = {}
    arrows = []
    for line in figure().splitlines():
        if (found := re.fullmatch(rf"\s*{NODE} --> {NODE}", line)) is None:
            continue
        source, source_label, to, to_label = found.groups()
        arrows.append((source, to))
        for name, label in ((source, source_label), (to, to_label)):
            if label or name not in labels:
                labels[name] = label or name
    return {name: WIDER.get(name) or _modules(label) for name, label in labels.items()}, arrows


def _modules(label: str) -> tuple[str, ...]:
    """`engine/settings, stats` names engine.settings and engine.stats; "…" stands for the rest."""
    first, *others = label.split(", ")
    folder = first.rpartition("/")[0]
    names = [first, *(f"{folder}/{name}" if folder else name for name in others)]
    return tuple(name.replace("/", ".") for name in names)


@cache
def modules() -> dict[str, Path]:
    """All modules of the package below vllm_redrafter, dotted; __init__ files left out."""
    found = {}
    for root, prefix in (
        (REPO / "vllm_redrafter", ""),
        (REPO / "triton_kernels", "triton_kernels."),
    ):
        for path in root.rglob("*.py"):
            if path.name != "__init__.py":
                name = prefix + ".".join(path.relative_to(root).with_suffix("").parts)
                found[name] = path
    return found


def _folders(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def imports(path: Path) -> Iterator[str]:
    """Modules below vllm_redrafter that a file imports, dotted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_redrafter"):
            base = (node.module or "").removeprefix("vllm_redrafter").removeprefix(".")
            for alias in node.names:
                name = f"{base}.{alias.name}" if base else alias.name
                yield name if name in modules() else base


def box_of(module: str) -> str:
    """The box that names the module or its folder, else the one that has "…" in its folder."""
    boxes = boxes_and_arrows()[0]
    rest = ".".join([*module.split(".")[:-1], "…"])
    for names in ((module, *_folders(module)), (rest,)):
        for box, members in boxes.items():
            if not set(names).isdisjoint(members):
                return box
    pytest.fail(f"{module} is in no box of the figure in docs/architecture.md: draw it")


@cache
def real_arrows() -> set[tuple[str, str]]:
    """Box to box, from the imports."""
    found = set()
    for module, path in modules().items():
        for imported in imports(path):
            pair = (box_of(module), box_of(imported)) if imported else None
            if pair and pair[0] != pair[1]:
                found.add(pair)
    return found


def reachable(start: str) -> set[str]:
    """Boxes that arrows lead to from a box."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        here = waiting.pop()
        for source, to in boxes_and_arrows()[1]:
            if source == here and to not in seen:
                seen.add(to)
                waiting.append(to)
    return seen


def test_every_module_is_in_the_figure_and_every_box_is_a_module() -> None:
    known = modules()
    for module in known:
        box_of(module)
    for members in boxes_and_arrows()[0].values():
        for member in members:
            named = [m for m in known if m == member or m.startswith(f"{member}.")]
            assert named or member.endswith("…"), member


def test_every_import_is_an_arrow_or_a_path_of_arrows() -> None:
    assert not sorted(pair for pair in real_arrows() if pair[1] not in reachable(pair[0]))


def test_every_arrow_is_an_import() -> None:
    assert not sorted(set(boxes_and_arrows()[1]) - real_arrows())
