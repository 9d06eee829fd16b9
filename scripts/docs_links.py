# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links that lead out of docs/ become links to the repository.

The documents link to files as GitHub resolves them (`../vllm_redrafter/plugin.py`). The site has
no such pages, so there they lead to the repository, at the branch or tag `extra.links_ref`.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.docs_links")  # mkdocs counts warnings below its own name

FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
OUTWARD = re.compile(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
"""A link whose path begins with `../`, and its anchor."""


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Any) -> str:
    """The page's text with its outward links rewritten; a dead one is a warning, so strict fails.

    Args:
        markdown: the page's source.
        page: whose it is; its folder is where links begin.
        config: of the site; `repo_url` and `extra.links_ref` say where links lead.
        files: unused, mkdocs passes it.
    """
    repo = Path(config.config_file_path).resolve().parent  # mike names it relatively
    source = Path(page.file.abs_src_path or "")
    address = f"{config.repo_url}/{{kind}}/{config.extra['links_ref']}/{{path}}"

    def rewritten(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / link[1]))
        if not target.exists() or not target.is_relative_to(repo):
            log.warning("%s links to %s, which does not exist", page.file.src_uri, link[1])
            return link[0]
        kind = "tree" if target.is_dir() else "blob"
        path = target.relative_to(repo).as_posix()
        return f"]({address.format(kind=kind, path=path)}{link[2] or ''})"

    parts = FENCE.split(markdown)  # those with odd numbers are fenced code
    return "".join(p if i % 2 else OUTWARD.sub(rewritten, p) for i, p in enumerate(parts))
