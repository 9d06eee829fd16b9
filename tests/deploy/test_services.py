# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes and systemd are given is valid, and starts a server with options that exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from redrafter_testing.vllm_options import options_of_vllm

DEPLOY = Path(__file__).parents[2] / "deploy"
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


def test_a_server_that_lost_its_engine_is_started_again() -> None:
    assert "Restart=always" in UNIT.read_text().splitlines()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/vllm-redrafter/bin/python", sys.executable)
    (tmp_path / UNIT.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / UNIT.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
