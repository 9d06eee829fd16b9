# SPDX-License-Identifier: Apache-2.0
"""Another version's Python sources of vLLM, over the compiled code of the installed CPU build.

For a vLLM version of which no CPU build is published:

    python scripts/overlay_vllm.py vllm-0.33.0-….whl /tmp/vllm-0.33
    PYTHONPATH=/tmp/vllm-0.33 .venv/bin/pytest tests/engine/test_vllm_interface.py tests/engine/v2

Packages that only the other version asks for are yours to install (0.33's server: orjson).

FOLDER then holds the Python files of the wheel (any platform's), Triton kernels included, and
links to the extension modules of the vLLM that is installed where this script runs. As it calls
itself "+cpu", vLLM chooses its CPU platform.

What tests on it prove: our code works with that version's configuration, scheduler, workers, model
runners, samplers and models. What they do not: that it works with that version's compiled code,
with the releases of torch and the other packages that the version asks for, or on a GPU. An op
that has other arguments in that version fails (0.33.0: mixtures of experts on a CPU do).
"""

from __future__ import annotations

import argparse
import sys
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile


def is_compiled(name: str) -> bool:
    return name.endswith(".so") or name == "vllm/vllm-rs"


def installed_vllm() -> Path:
    """The package's folder, which must be that of a CPU build.

    Raises:
        SystemExit: it is not.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vLLM is not installed where this runs: use .venv/bin/python")
    if not distribution("vllm").version.endswith("+cpu"):
        sys.exit(f"{spec.origin} is not a CPU build, whose compiled code is needed")
    return Path(spec.origin).parent


def unpack(wheel: Path, folder: Path) -> Message:
    """Unpack the package without its compiled code; the wheel's metadata."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not is_compiled(name)]
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        archive.extractall(folder, [name for name in names if name.startswith("vllm/")])
        parsed = Parser().parsestr(archive.read(metadata).decode())
    return parsed


def link_compiled(installed: Path, folder: Path) -> list[str]:
    """Link the installed extension modules into the package in `folder`; their names."""
    modules = sorted(path.relative_to(installed) for path in installed.rglob("*.so"))
    for module in modules:
        link = folder / "vllm" / module
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((installed / module).resolve())
    return [str(module) for module in modules]


def write_metadata(version: str, folder: Path) -> None:
    """What `importlib.metadata` finds before the installed vLLM's; without requirements."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="vLLM's wheel of the other version")
    parser.add_argument("folder", type=Path, help="to write; must not exist")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name a folder that does not")
    installed = installed_vllm()
    arguments.folder.mkdir(parents=True)
    metadata = unpack(arguments.wheel, arguments.folder)
    version = metadata["Version"].partition("+")[0] + "+cpu"
    modules = link_compiled(installed, arguments.folder)
    write_metadata(version, arguments.folder)
    print(f"vLLM {version} in {arguments.folder}, with {', '.join(modules)} of {installed}")


if __name__ == "__main__":
    main()
