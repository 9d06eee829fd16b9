# SPDX-License-Identifier: Apache-2.0
"""The site has every document, and a build of it fails where a link is dead."""

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


def build(config: Path, site: Path, ref: str = "main") -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, into another folder; the config is named as mike names it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config.name, "-d", site]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DOCS_REF": ref}
    return subprocess.run(
        command, cwd=config.parent, capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(REPO / "mkdocs.yml", folder, ref="v9.8.7")
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with the hook, a document and a file outside docs/."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "source.py").touch()
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"site_name: small\nrepo_url: {ADDRESS}\nextra: {{links_ref: main}}\n"
        f"hooks: [{REPO / 'scripts' / 'docs_links.py'}]\n"
    )
    return config


def test_every_document_is_a_page(site: Path) -> None:
    for document in (REPO / "docs").glob("*.md"):
        page = "" if document.stem == "index" else document.stem
        assert (site / page / "index.html").is_file(), document


def test_a_link_out_of_docs_leads_to_the_repository_at_the_release(site: Path) -> None:
    text = (site / "architecture" / "index.html").read_text()
    assert f'href="{ADDRESS}/blob/v9.8.7/vllm_redrafter/plugin.py"' in text
    assert f'href="{ADDRESS}/tree/v9.8.7/vllm_redrafter/mlx"' in text
    assert 'href="../../' not in text


@pytest.mark.parametrize("link", ["../gone.py", "page.md#gone"])
def test_a_dead_link_fails_the_build(small: Path, tmp_path: Path, link: str) -> None:
    (small.parent / "docs" / "page.md").write_text("# Page\n")
    (small.parent / "docs" / "index.md").write_text(f"# Start\n\n[a link]({link})\n")
    validation = "validation: {links: {anchors: warn}}\n"
    small.write_text(small.read_text() + validation)
    assert build(small, tmp_path / "site").returncode != 0


def test_what_looks_like_a_link_in_code_stays(small: Path, tmp_path: Path) -> None:
    text = "# Start\n\n[a link](../source.py)\n\n```\n[code](../gone.py)\n```\n"
    (small.parent / "docs" / "index.md").write_text(text)
    assert build(small, tmp_path / "site").returncode == 0
    page = (tmp_path / "site" / "index.html").read_text()
    assert f"{ADDRESS}/blob/main/source.py" in page and "[code](../gone.py)" in page


def test_every_exported_name_has_its_documentation(site: Path) -> None:
    documented = set(
        re.findall(r'id="vllm_redrafter\.[\w.]*?(\w+)"', (site / "api/index.html").read_text())
    )
    assert not set(vllm_redrafter.__all__) - documented
    assert {"allowed_nodes", "search_shape", "generate", "stream_generate"} <= documented
