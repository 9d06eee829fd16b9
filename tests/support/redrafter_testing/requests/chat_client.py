# SPDX-License-Identifier: Apache-2.0
"""Chat requests to an OpenAI-compatible server, and what came of them."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

Message = dict[str, Any]


@contextmanager
def posted(url: str, body: Any) -> Iterator[HTTPResponse]:
    """The response to a request, as it comes."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        yield response


@contextmanager
def asked(address: str, messages: Sequence[Any], **more: Any) -> Iterator[HTTPResponse]:
    """The response to a chat request, as it comes."""
    with posted(f"{address}/v1/chat/completions", {"messages": [*messages], **more}) as response:
        yield response


def continued(address: str, text: str, **more: Any) -> str:
    """How a text goes on."""
    with posted(f"{address}/v1/completions", {"prompt": text, **more}) as response:
        return str(json.load(response)["choices"][0]["text"])


def said(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def answer(address: str, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
    """The whole answer: `choices` and `usage`, without what differs between servers."""
    with asked(address, messages, **more) as response:
        found = json.load(response)
    return {key: found[key] for key in ("choices", "usage")}


def chunks(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """What a stream consists of."""
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def streamed(address: str, messages: Sequence[Message], **more: Any) -> list[Any]:
    """The choices of all chunks of a stream, and its usage at the end."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with asked(address, messages, **usage, **more) as response:
        return [chunk["choices"] or chunk["usage"] for chunk in chunks(response)]


def refusal(address: str, messages: Sequence[Any], **more: Any) -> str:
    """Why a request was refused."""
    try:
        with asked(address, messages, **more):
            raise AssertionError("the request was accepted")
    except urllib.error.HTTPError as error:
        return str(json.load(error)["error"])
