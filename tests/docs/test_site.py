# SPDX-License-Identifier: Apache-2.0
"""The site is built without warnings, of dead links say, and has every document."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_redrafter

pytest.importorskip("mkdocs")

REPO = Path(__file__).parents[2]
ADDRESS = "https://github.com/vllm-redrafter/vllm-redrafter"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds, into another folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DOCS_REF": "v9.8.7"}
    built = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    for document in (REPO / "docs").glob("*.md"):
        page = "" if document.stem == "index" else document.stem
        assert (site / page / "index.html").is_file(), document


def test_a_link_out_of_docs_leads_to_the_repository_at_the_release(site: Path) -> None:
    text = (site / "architecture" / "index.html").read_text()
    assert f'href="{ADDRESS}/blob/v9.8.7/vllm_redrafter/plugin.py"' in text
    assert f'href="{ADDRESS}/tree/v9.8.7/vllm_redrafter/mlx"' in text
    assert 'href="../../' not in text


def test_every_exported_name_and_the_commands_are_documented(site: Path) -> None:
    assert 'id="vllm-redrafter-train"' in (site / "cli/index.html").read_text()
    documented = set(
        re.findall(r'id="vllm_redrafter\.[\w.]*?(\w+)"', (site / "api/index.html").read_text())
    )
    assert not set(vllm_redrafter.__all__) - documented
    assert {"allowed_nodes", "search_shape", "stream_generate"} <= documented
