# SPDX-License-Identifier: Apache-2.0
"""The overlay is a vLLM of the wheel's version, with the installed one's compiled code."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

from redrafter_testing.python_path import python_path

pytestmark = pytest.mark.skipif(
    not version("vllm").endswith("+cpu"), reason="the overlay is made of a CPU build"
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "overlay_vllm.py"
LOOK = """
import importlib.metadata, importlib.util, vllm
print(importlib.metadata.version("vllm"))
print(vllm.__file__)
print(importlib.util.find_spec("vllm._C").origin)
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Of a CUDA build: its compiled code is of no use."""
    path = tmp_path / "vllm-9.8.7-cp38-abi3-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", "of CUDA")
        archive.writestr("vllm-9.8.7.dist-info/METADATA", "Name: vllm\nVersion: 9.8.7\n")
    return path


def test_python_files_are_the_wheel_s_and_compiled_ones_the_installed(
    wheel: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "overlay"
    subprocess.run([sys.executable, SCRIPT, wheel, folder], check=True)
    environment = {**os.environ, "PYTHONPATH": python_path(folder)}
    looked = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True
    )
    extension = folder / "vllm" / "_C.abi3.so"
    assert looked.stdout.splitlines() == [
        "9.8.7+cpu",
        str(folder / "vllm" / "__init__.py"),
        str(extension),
    ]
    assert extension.stat().st_size > 1_000_000
