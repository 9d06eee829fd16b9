# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter swap`: what is asked of a server, and what is said of its answer."""

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.fake_server import FakeServer
from redrafter_testing.engines.server import free_port
from redrafter_testing.own_commands import printed_by, refusal_of


class SwappingServer(FakeServer):
    def __init__(self, status: int, answer: Any) -> None:
        super().__init__(tokenizer=None)
        self.answer, self.calls = (status, answer), list[Any]()

    def respond(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        self.calls.append((path, body))
        return self.answer


def test_a_server_is_told_a_folder_s_whole_path_and_other_names_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path)
    server = SwappingServer(200, {"results": [{"drafter": "its name"}] * 2})
    for drafter, named in (("new", str(tmp_path / "new")), ("some/hub-id", "some/hub-id")):
        said = printed_by("swap", "--url", server.address, drafter)
        assert said == f"{server.address} drafts with its name now"
        call = {"method": "redrafter_swap", "args": [named]}
        assert server.calls.pop() == ("/collective_rpc", call)
    server.die()


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError"}}


OF_WORKER = (
    "Call to collective_rpc method failed: Worker failed with error '/new: w holds NaN; take "
    "another', please check the stack trace above for the root cause"
)


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (404, {"detail": "Not Found"}, "start it with VLLM_SERVER_DEV_MODE=1"),
        (501, error("Method 'redrafter_swap' is not implemented."), "with --spec-model DRAFTER"),
        (500, error(OF_WORKER), "refuses /new and keeps its own: /new: w holds NaN; take another"),
        (502, "no JSON object", "answers with status 502: "),
        (200, {"models": []}, "no server of vLLM answers"),
    ],
)
def test_what_a_server_lacks_or_refuses_is_said(status: int, answer: Any, said: str) -> None:
    server = SwappingServer(status, answer)
    output = refusal_of("swap", "--url", server.address, "/new")
    assert server.address in output and said in output
    assert "please check the stack trace" not in output
    server.die()


@pytest.mark.parametrize("url", ["http://127.0.0.1:PORT", "localhost", "http://[:1"])
def test_where_no_server_is_the_option_is_named(url: str) -> None:
    url = url.replace("PORT", str(free_port()))
    output = refusal_of("swap", "--url", url, "/new")
    assert "--url" in output and url in output
