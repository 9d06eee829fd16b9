# SPDX-License-Identifier: Apache-2.0
"""Chat requests to an OpenAI-compatible server, and what came of them."""

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def said(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def answer(address: str, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The whole answer: `choices` and `usage`, without what differs between servers."""
    url, body = f"{address}/v1/chat/completions", {"messages": [*messages], **more}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        found = json.load(response)
    return {key: found[key] for key in ("choices", "usage")}
