# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: the page of the commands gets what `vllm-redrafter --help` says of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from typer.cli import get_docs_for_click

from vllm_redrafter.cli.main import app

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Any) -> str:
    """The page's text, and behind that of cli.md the commands as typer documents them."""
    if page.file.src_uri != "cli.md":
        return markdown
    commands = typer.main.get_command(app)
    written = get_docs_for_click(obj=commands, ctx=typer.Context(commands), name="vllm-redrafter")
    _, _, behind_title = written.partition("\n")
    return markdown + behind_title
