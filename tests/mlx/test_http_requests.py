# SPDX-License-Identifier: Apache-2.0
"""No request ends mlx-serve: whatever one says, the next one has the answer it always had."""

import http.client
import json
import reprlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from redrafter_testing.models.reciting_target import ANSWERS
from redrafter_testing.requests.chat_client import said

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Of the servers in conftest.py: the vocabulary size, and `max_tokens` on which one fails.
VOCAB_SIZE, FAILS = 512, 77
NORMAL = {"messages": said("names"), "max_tokens": 40, "temperature": 0}

# Of each field of a request, as JSON: the message names the field and the value.
VALUES = {
    "temperature": ["-1", "1e-320", "1e308", "1" + "0" * 400, "true", '"1"', "NaN", "1e400"],
    "top_p": ["-0.1", "1.1", "1e-320", "true", "Infinity"],
    "top_k": ["-1", "512", "100000", "1" + "0" * 30, "1.0", "true"],
    "min_p": ["2", "NaN", '"x"'],
    "xtc_probability": ["1.5", "NaN"],
    "xtc_threshold": ["0.6", "-Infinity"],
    "repetition_penalty": ["-1", "NaN", "1e-320", "1" + "0" * 400],
    "repetition_context_size": ["-1", "9223372036854775808", "1.5"],
    "presence_penalty": ["-Infinity", "1e308", "1" + "0" * 400],
    "presence_context_size": ["-1", "1" + "0" * 30],
    "frequency_penalty": ["NaN", "-1e308", "[]"],
    "frequency_context_size": ["-1", "1" + "0" * 30],
    "top_logprobs": ["12", "-2", "1.0"],
    "logprobs": ["5", "1"],
    "seed": ["-1", "18446744073709551616", "1.5", "true", '"a"'],
    "max_tokens": ["0", "-1", "1" + "0" * 20, "1.5", '"5"', "true"],
    "n": ["2", "0"],
    "stream": ['"true"', "1"],
    "stop": ["5", "[1]", '["a", null]', '[["a"]]', "{}", '["\\ud800"]'],
    "logit_bias": ["[[1, 2]]", '{"1": null}', '{"1": NaN}', '{"1": 1' + "0" * 400 + "}"],
    "messages": ["{}", '"x"', "[5]", '[{"role": "user", "content": ["names"]}]'],
    "tools": ["5", "{}"],
    "role_mapping": ["5"],
    "chat_template_kwargs": ["5", "[]"],
    "stream_options": ["5", "[]"],
    "draft_model": ["5", "[]"],
}
# Here what is wrong is inside the value.
PARTS = {
    "logit_bias": [
        *(f'{{"{token}": 5}}' for token in (-99999, -1, 512, 99999, 2**31, 2**32, 10**20)),
        '{"a": 1}',
        '{"1": 1e308}',
    ],
    "messages": [
        "[]",
        "[{}]",
        '[{"content": "names"}]',
        '[{"role": "user", "content": [{"type": "text"}]}]',
        '[{"role": "user", "content": [{"type": "input_audio"}]}]',
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]',
        '[{"role": "user", "content": "\\ud800"}]',
        # The target has no token of this id.
        f'[{{"role": "user", "content": "<|{VOCAB_SIZE - 1}|>"}}]',
        '[{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]',
        '[{"role": "user", "content": ' + "[" * 900 + "]" * 900 + "}]",
    ],
    "num_draft_tokens": ["2"],
    "chat_template_kwargs": [
        '{"tokenize": false}',
        '{"return_tensors": "np"}',
        '{"padding": "max_length", "max_length": 1000000000}',
        # It would go on for hours.
        json.dumps({"chat_template": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3}),
    ],
}
PROMPTS = ["null", "5", "[]", '""', '["a", "b"]', "[1, 2, 3]", "[99999]", "[[99999]]", '"\\ud800"']
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
# What clients send beside the messages, `max_tokens` and `temperature`.
CLIENTS: dict[str, dict[str, Any]] = {
    "LiteLLM": {"model": "default_model", "user": "a", "extra_body": {}, "tool_choice": "auto"},
    "Open WebUI": {"stream_options": {"include_usage": True}, "chat_id": "1", "features": {}},
    "llama.cpp": {
        **{"cache_prompt": True, "samplers": ["top_k"], "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        **{"xtc_probability": 0, "xtc_threshold": 0.1, "typical_p": 1, "presence_penalty": 0},
        **{"frequency_penalty": 0, "repeat_penalty": 1, "repeat_last_n": 64, "grammar": ""},
    },
    "Continue": {"model": "default_model", "n": 1, "stop": ["<|im_end|>"], "prediction": None},
    "nulls": {
        **dict.fromkeys(["model", "draft_model", "top_p", "top_k", "seed", "stop", "n", "stream"]),
        **dict.fromkeys(["tools", "logprobs", "top_logprobs", "logit_bias", "stream_options"]),
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "names"}]}]},
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
def test_a_bad_value_is_refused_by_field_and_value(address: str, field: str) -> None:
    for value in VALUES[field]:
        message = refusal_of(address, with_field(field, value))
        assert message.startswith(f"{field} must be")
        assert reprlib.repr(json.loads(value)) in message


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("field", PARTS)
def test_a_bad_part_of_a_value_is_refused_by_field(
    address: str, field: str, is_streamed: bool
) -> None:
    for value in PARTS[field]:
        message = refusal_of(address, with_field(field, value, stream=is_streamed))
        assert message.startswith(field)


def test_a_prompt_or_a_body_that_cannot_be_read_is_refused(address: str) -> None:
    for prompt in PROMPTS:
        message = refusal_of(address, f'{{"prompt": {prompt}, "max_tokens": 5}}'.encode(), TEXT)
        assert "prompt" in message
    for kind, body in BODIES.items():
        assert refusal_of(address, body), kind


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_forms_are_answered(address: str, client: str) -> None:
    assert text_of(address, **CLIENTS[client]) == ANSWERS["names"]


@pytest.mark.parametrize("field", ["model", "draft_model"])
def test_a_model_that_is_not_there_ends_its_request_alone(address: str, field: str) -> None:
    status, body = sent(address, with_field(field, '"nowhere/nothing"'))
    assert status in (400, 404)
    assert json.loads(body)["error"]


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
