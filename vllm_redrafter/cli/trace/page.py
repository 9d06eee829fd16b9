# SPDX-License-Identifier: Apache-2.0
"""The page of a traced answer: one file that asks the network for nothing."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

PLACE = "__TRACE__"
"""Where the template wants the data."""


def page(records: dict[str, Any]) -> str:
    """The page as HTML; what tokens have of markup cannot end the script that holds the data."""
    data = json.dumps(records)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = (files("vllm_redrafter.cli.trace") / "page.html").read_text(encoding="utf-8")
    return template.replace(PLACE, data)
