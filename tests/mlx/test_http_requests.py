# SPDX-License-Identifier: Apache-2.0
"""No request ends mlx-serve: whatever one says, the next one has the answer it always had."""

import http.client
import json
import socket
import struct
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from redrafter_testing.models.reciting_target import ANSWERS
from redrafter_testing.requests.chat_client import said

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Of the servers in conftest.py: `max_tokens` on which one fails.
FAILS = 77
NORMAL = {"messages": said("names"), "max_tokens": 40, "temperature": 0}

TEXTS = Path(__file__).with_name("http_requests.toml").read_text()
LARGE = TEXTS.replace("HUGE", "1" + "0" * 400).replace("DEEP", "[" * 900 + "]" * 900)
VALUES, REFUSED, PROMPTS, CLIENTS = tomllib.loads(LARGE).values()
BODIES = {
    "nothing": b"",
    "a list": b"[]",
    "no JSON": b"hello",
    "no UTF-8": b'{"messages": "\xff"}',
    "UTF-16": json.dumps(NORMAL).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "depth": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"max_tokens": ' + b"9" * 5000 + b"}",
}


@pytest.fixture
def address(servers: Any) -> Iterator[str]:
    """Of the server, which answers as ever after the test, too."""
    netloc = urlsplit(servers.ours).netloc
    yield netloc
    assert text_of(netloc) == ANSWERS["names"]


def sent(address: str, body: bytes, path: str = CHAT) -> Any:
    """Status and body of the response."""
    client = http.client.HTTPConnection(address, timeout=60)
    client.request("POST", path, body)
    with client.getresponse() as response:
        return response.status, response.read()


def text_of(address: str, **more: Any) -> str:
    status, body = sent(address, json.dumps({**NORMAL, **more}).encode())
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"])


def with_field(field: str, value: str, **more: Any) -> bytes:
    """A normal request that is sampled, with a field in JSON."""
    request = {**NORMAL, "temperature": 1.0, **more}
    request.pop(field, None)
    return f'{json.dumps(request)[:-1]}, "{field}": {value}}}'.encode()


def refusal_of(address: str, body: bytes, path: str = CHAT) -> str:
    status, answer = sent(address, body, path)
    assert status == 400, answer
    return str(json.loads(answer)["error"])


@pytest.mark.parametrize("field", VALUES)
def test_a_bad_value_ends_its_request_alone(address: str, field: str) -> None:
    for value in VALUES[field]:
        status, answer = sent(address, with_field(field, value))
        assert status == 200 or json.loads(answer)["error"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("field", REFUSED)
def test_what_would_end_more_is_refused_by_field(
    address: str, field: str, is_streamed: bool
) -> None:
    for value in REFUSED[field]:
        assert refusal_of(address, with_field(field, value, stream=is_streamed)).startswith(field)


def test_what_cannot_be_read_or_is_not_there_ends_its_request_alone(address: str) -> None:
    prompts = [f'{{"prompt": {prompt}, "max_tokens": 5}}'.encode() for prompt in PROMPTS["all"]]
    models = [with_field(field, '"nowhere/nothing"') for field in ("model", "draft_model")]
    for path, body in (*product([TEXT], prompts), *product([CHAT], models)):
        status, answer = sent(address, body, path)
        assert status in (400, 404) and json.loads(answer)["error"]
    for kind, body in BODIES.items():
        assert refusal_of(address, body), kind


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_forms_are_answered(address: str, client: str) -> None:
    assert text_of(address, **json.loads(CLIENTS[client])) == ANSWERS["names"]


def test_a_failure_while_generating_ends_its_request_alone(address: str) -> None:
    status, body = sent(address, with_field("max_tokens", str(FAILS)))
    assert status == 500
    assert "fails on purpose" in json.loads(body)["error"]
    assert text_of(address) == ANSWERS["names"]
    status, body = sent(address, with_field("max_tokens", str(FAILS), stream=True))
    assert status == 200  # it was sent before the failure
    last = body.decode().strip().split("\n\n")[-1].removeprefix("data: ")
    assert "fails on purpose" in json.loads(last)["error"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_hangs_up_ends_its_request_alone(address: str, is_streamed: bool) -> None:
    host, port = address.split(":")
    body = json.dumps({**NORMAL, "stream": is_streamed}).encode()
    for end in (len(body), len(body) // 2):
        with socket.create_connection((host, int(port)), 60) as client:
            # Closing resets the connection.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body[:end])
        assert text_of(address) == ANSWERS["names"]


def test_models_are_listed_where_nothing_was_ever_downloaded(address: str) -> None:
    client = http.client.HTTPConnection(address, timeout=60)
    client.request("GET", "/v1/models")
    listed = json.load(client.getresponse())["data"]
    assert [Path(model["id"]).name for model in listed] == ["target"]
