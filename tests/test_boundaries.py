# SPDX-License-Identifier: Apache-2.0
"""The order of packages: which modules may import which, and who may import vLLM.

Imports are read from the sources, wherever they stand in a module: inside a function and under
TYPE_CHECKING as well.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vllm_redrafter
import vllm_redrafter.triton_kernels

NAME = "vllm_redrafter"
PACKAGE = Path(vllm_redrafter.__file__).parent
KERNELS = Path(vllm_redrafter.triton_kernels.__file__).parent

FLOORS = (
    ("__main__",),
    ("cli.main",),
    ("cli.data", "cli.training"),
    ("cli.options",),
    ("cli", "plugin"),
    ("engine.selection", "engine.speculative_config"),
    ("engine.cpu.v1", "engine.v2"),
    ("engine.cpu",),
    ("engine", "evaluation", "mlx", "offline", "triton_kernels"),
    ("training",),
    ("replay",),
    ("data",),
    ("drafting",),
    ("budget",),
    ("tree",),
    ("checkpoints",),
    ("heads",),
    ("config",),
    ("utils",),
)
"""From the top floor down. A room imports from the floors below its own, never from its own floor
or above. A module belongs to the room that its name begins with, to the longest if several fit.
"""


def sources() -> dict[str, str]:
    """By name within the package, such as `engine.cpu.v1.runner`: what a module consists of."""
    found = {}
    for folder, prefix in ((PACKAGE, ()), (KERNELS, ("triton_kernels",))):
        for path in folder.rglob("*.py"):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path.read_text()
    del found["__init__"]  # the public names, which come from everywhere
    return found


def imported(source: str) -> Iterator[str]:
    """Names of absolute imports: of modules, and of what may be one (`from a import b`: a.b)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """From each module to those of the package that it imports."""
    found: dict[str, set[str]] = {}
    for module, source in modules.items():
        names = [n.removeprefix(f"{NAME}.") for n in imported(source) if n.startswith(f"{NAME}.")]
        # What is no module is a name of one.
        found[module] = {n if n in modules else n.rpartition(".")[0] for n in names} - {"", module}
    return found


ROOMS = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
"""The floor of each, counted from the top."""


def room(module: str) -> str:
    """Where a module belongs."""
    rooms = [room for room in ROOMS if f"{module}.".startswith(f"{room}.")]
    assert rooms, f"{module} is in no room: give it one in FLOORS"
    return max(rooms, key=len)


def running_up(modules: Mapping[str, str]) -> list[str]:
    """Imports that do not run down."""
    return [
        f"{module} imports {other}"
        for module, others in arrows(modules).items()
        for other in sorted(others)
        if room(module) != room(other) and ROOMS[room(module)] >= ROOMS[room(other)]
    ]


def circle(modules: Mapping[str, str]) -> list[str]:
    """Modules that import each other in turn; none where there is no such circle."""
    try:
        TopologicalSorter(arrows(modules)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def reached(module: str, modules: Mapping[str, str]) -> set[str]:
    """The packages that a module imports, itself or through others of this one."""
    graph, seen, waiting = arrows(modules), set[str](), {module}
    while waiting:
        seen |= waiting
        waiting = {other for each in waiting for other in graph[each]} - seen
    return {name.split(".")[0] for each in seen for name in imported(modules[each])}


def may_import_vllm(module: str) -> bool:
    return module == "plugin" or module.startswith(("engine.", "offline."))


MODULES = sources()


@pytest.mark.parametrize("module", [name for name in sorted(MODULES) if not may_import_vllm(name)])
def test_vllm_is_imported_by_engines_offline_and_the_plugin_alone(module: str) -> None:
    assert "vllm" not in {name.split(".")[0] for name in imported(MODULES[module])}


V1 = re.compile(
    r"vllm\.v1\.(sample|spec_decode\.metadata|worker\.(gpu_input_batch|gpu_model_runner|cpu_\w+))\b"
)
"""The runner of vLLM that is called deprecated, its sampler and what these hand around."""


@pytest.mark.parametrize("module", sorted(MODULES))
def test_what_model_runner_v1_has_alone_is_imported_by_one_folder(module: str) -> None:
    assert room(module) == "engine.cpu.v1" or not any(map(V1.match, imported(MODULES[module])))


@pytest.mark.parametrize("module", [name for name in sorted(MODULES) if room(name) == "heads"])
def test_heads_import_neither_triton_nor_numba(module: str) -> None:
    assert not {"triton", "numba"} & reached(module, MODULES)


def test_imports_run_down_only() -> None:
    assert running_up(MODULES) == []


def test_no_modules_import_each_other() -> None:
    assert circle(MODULES) == []


def test_at_most_sixteen_rooms_and_modules_stand_at_the_top() -> None:
    """Besides what Python itself asks for: __init__.py and __main__.py."""
    top = {module.partition(".")[0] for module in MODULES} - {"__main__", "triton_kernels"}
    assert {"config", "plugin"} < top and len(top) <= 16


def test_every_room_has_a_module() -> None:
    assert {room(module) for module in MODULES} == ROOMS.keys()


def test_planted_imports_that_run_up_reach_numba_or_close_a_circle_are_found() -> None:
    for module, line, found in (
        ("engine.embedding", "from vllm_redrafter.plugin import register", "plugin"),
        ("training.run", "def f():\n    import vllm_redrafter.offline.llm", "offline.llm"),
    ):
        planted = MODULES | {module: f"{MODULES[module]}\n\n{line}\n"}
        assert running_up(planted) == [f"{module} imports {found}"]
    line = "from vllm_redrafter.utils.top_of_many import top"
    planted = MODULES | {"heads.norm": f"{MODULES['heads.norm']}\n\n{line}\n"}
    assert "numba" in reached("heads.gated", planted)
    line = "from vllm_redrafter.engine.v2 import tree_verifier"
    planted = MODULES | {"engine.v2.verification": line}
    assert set(circle(planted)) == {"engine.v2.tree_verifier", "engine.v2.verification"}
