# SPDX-License-Identifier: Apache-2.0
"""What an installation contains, and under which names."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from zipfile import ZipFile

REPO = Path(__file__).resolve().parents[1]
PACKAGES = {"vllm_redrafter": "vllm_redrafter", "triton_kernels": "vllm_redrafter/triton_kernels"}
DRAFTER = "checkpoints/drafters/smollm2-135m-instruct/model.safetensors"


def test_kernels_are_only_importable_inside_the_package(tmp_path: Path) -> None:
    """vLLM imports OpenAI's `triton_kernels` when there is one: ours must not pass for it."""
    # Isolated (-I) and elsewhere: what is found is found through the installation alone.
    find = "import importlib.util as u; spec = u.find_spec({!r}); print(spec and spec.origin)"

    def origin(module: str) -> str:
        command = [sys.executable, "-I", "-c", find.format(module)]
        return subprocess.check_output(command, cwd=tmp_path, text=True).strip()

    kernels = origin("vllm_redrafter.triton_kernels")
    assert kernels.endswith("__init__.py")
    assert origin("triton_kernels") != kernels


def test_vllm_finds_the_plugin() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="redrafter")
    assert plugin.value == "vllm_redrafter.plugin:register"


def test_distributions_contain_every_file_once_and_nothing_else(tmp_path: Path) -> None:
    """The wheel is built from the source distribution, as pip does."""
    # A copy: a build leaves files beside the sources, which the next build would put in.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (REPO / name).exists():
            shutil.copy(REPO / name, source)
    for folder in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(REPO / folder, source / folder, ignore=ignore)
    expected = set()
    for folder, package in PACKAGES.items():
        paths = [file for file in (source / folder).rglob("*") if file.is_file()]
        expected |= {f"{package}/{file.relative_to(source / folder)}" for file in paths}
    script = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    sdist = [sys.executable, "-c", script, tmp_path]
    subprocess.run(sdist, cwd=source, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    offline = os.environ | {"PIP_NO_INDEX": "1"}
    subprocess.run([*build, "--wheel-dir", tmp_path, packed], check=True, env=offline)

    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
        described = archive.read("vllm_redrafter-0.1.0.dist-info/METADATA").decode()
    metadata = [name for name in files if name.startswith("vllm_redrafter-0.1.0.dist-info/")]
    assert sorted(set(files) - set(metadata)) == sorted(expected)
    assert "/blob/v0.1.0/docs/serving.md#install)" in described
    assert not re.findall(r"\]\((?!https:)", described), "package indexes resolve no relative link"
    assert "vllm_redrafter/py.typed" in files
    assert f"vllm_redrafter/{DRAFTER}" in files
    assert "vllm_redrafter-0.1.0.dist-info/licenses/LICENSE" in metadata
