# SPDX-License-Identifier: Apache-2.0
"""A server that speaks as vLLM's does, with `FakeEngine`'s answers."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from redrafter_testing.engines.fake_engine import FakeEngine
from vllm_redrafter.data.settings import GenerationSettings
from vllm_redrafter.data.turns import OpenTurn

Failure = tuple[int, str]


class FakeServer:
    """Listens on a port of its own until `die`; `asked` and `most_at_once` are of completions.

    `failure` and `change` see each completion.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str = "target",
        root: str = "/models/target",
        max_model_len: int = 512,
        pause: float = 0.0,
        failure: Callable[[dict[str, Any]], Failure | None] = lambda body: None,
        change: Callable[[dict[str, Any]], None] = lambda completion: None,
    ) -> None:
        self.tokenizer, self.name, self.root = tokenizer, name, root
        self.max_model_len, self.pause = max_model_len, pause
        self.failure, self.change = failure, change
        self.asked: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        """Stop as a killed process does: in the middle of all answers."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            with suppress(OSError):  # it had ended
                connection.shutdown(socket.SHUT_RDWR)

    def respond(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Status and content."""
        if path == "/v1/models":
            card = {"id": self.name, "root": self.root, "max_model_len": self.max_model_len}
            adapter = {"id": "adapter", "root": "adapter", "parent": self.name}
            return 200, {"object": "list", "data": [adapter, {**card, "parent": None}]}
        if body is None or body["model"] != self.name:
            return 404, _error("no such model")
        if path == "/tokenize":
            return 200, {"tokens": list(self.tokenizer(body["prompt"])["input_ids"])}
        if failure := self.failure(body):
            return failure[0], _error(failure[1])
        completion = {"id": "cmpl", "object": "text_completion", "choices": [self._choice(body)]}
        self.change(completion)
        return 200, completion

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.asked.append(body)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        time.sleep(self.pause)
        with self._lock:
            self._running -= 1
        engine = FakeEngine(self.tokenizer, GenerationSettings(), self.max_model_len)
        turn = OpenTurn(0, 0, body["prompt"], body["max_tokens"], body["seed"])
        answer = engine.answer(turn)
        reason = "stop" if answer.ended else "length"
        tokens = {"prompt_token_ids": body["prompt"], "token_ids": answer.tokens}
        return {"index": 0, "text": "", "finish_reason": reason, **tokens}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was killed


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "error", "param": None, "code": None}}


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def setup(self) -> None:
            super().setup()
            server._connections.add(self.connection)

        def do_GET(self) -> None:
            self._respond(None)

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _respond(self, body: dict[str, Any] | None) -> None:
            status, content = server.respond(self.path, body)
            sent = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
