# SPDX-License-Identifier: Apache-2.0
"""The figure of packages in docs/architecture.md: its boxes exist, and its arrows are imports.

`tests/test_boundaries.py` holds the order of all packages.
"""

import re
from pathlib import Path

import vllm_redrafter
import vllm_redrafter.triton_kernels

TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
PACKAGE = Path(vllm_redrafter.__file__).parent
KERNELS = Path(vllm_redrafter.triton_kernels.__file__).parent
NODE = r"(\w+)(?:\[\"([^\"]+)\"\])?(?::::\w+)?"


def boxes_and_arrows() -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """The modules or folders that each box names, and the arrows between boxes."""
    figure = re.search(r"^## Packages$.*?```mermaid\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    assert figure is not None
    labels: dict[str, str] = {}
    arrows = []
    for found in re.finditer(rf"^\s*{NODE} --> {NODE}$", figure[1], re.MULTILINE):
        source, source_label, to, to_label = found.groups()
        arrows.append((source, to))
        for name, label in ((source, source_label), (to, to_label)):
            if label or name not in labels:
                labels[name] = label or name
    return {name: _modules(label) for name, label in labels.items()}, arrows


def _modules(label: str) -> list[str]:
    """`engine/selection, stats` names engine/selection and engine/stats; `engine/…` the folder."""
    first, *others = label.removesuffix("/…").split(", ")
    folder = first.rpartition("/")[0]
    return [first, *(f"{folder}/{name}" for name in others)]


def source(module: str) -> str:
    """What a module or folder consists of; empty where there is none."""
    place = KERNELS if module == "triton_kernels" else PACKAGE / module
    files = [*place.rglob("*.py"), place.with_suffix(".py")]
    return "".join(file.read_text() for file in files if file.exists())


def test_every_box_exists_and_every_arrow_is_an_import() -> None:
    boxes, arrows = boxes_and_arrows()
    assert len(boxes) > 10 and all(source(name) for names in boxes.values() for name in names)
    for begin, end in arrows:
        wanted = "|".join(name.replace("/", r"\.") for name in boxes[end])
        imported = re.compile(rf"(?:from|import) vllm_redrafter\.(?:{wanted})\b")
        assert any(imported.search(source(name)) for name in boxes[begin]), (begin, end)
