# SPDX-License-Identifier: Apache-2.0
"""Dashboard, alerts and documents ask for metrics that a server has."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_redrafter.engine.stat_logger import METRICS

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-redrafter.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
METRIC = re.compile(r"(?<![\w:-])(?:redrafter|vllm):[a-z]\w+\b(?!\*)")


def metrics_of_a_server() -> set[str]:
    """As Prometheus sees them: ours, and those that vLLM's sources name."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent / "v1"
    sources = [root / "metrics" / "loggers.py", root / "spec_decode" / "metrics.py"]
    theirs = {
        name for source in sources for name in re.findall(r'"(vllm:\w+)"', source.read_text())
    }
    ours = {f"{name}_total" for name, _ in METRICS.values()}
    return ours | theirs | {f"{name}{end}" for name in theirs for end in ("_total", "_bucket")}


@pytest.mark.parametrize(
    "file",
    [
        *("deploy/grafana-redrafter.json", "deploy/alerts.yml", "deploy/alerts.test.yml"),
        *("docs/deploy.md", "docs/serving.md"),
    ],
)
def test_every_metric_that_is_named_exists(file: str) -> None:
    named = set(METRIC.findall((REPO / file).read_text()))
    assert not named - metrics_of_a_server()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_and_asks_the_chosen_data_source(panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        selected = target["expr"].count('{model_name="$model_name", engine=~"$engine"}')
        assert selected == len(METRIC.findall(target["expr"])) > 0


def test_every_counter_is_on_the_dashboard_and_every_panel_and_alert_is_explained() -> None:
    shown = set(METRIC.findall(json.dumps(PANELS)))
    assert not {f"{name}_total" for name, _ in METRICS.values()} - shown
    text = (REPO / "docs" / "deploy.md").read_text()
    assert not [panel["title"] for panel in PANELS if panel["title"] not in text]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == ALERTS
