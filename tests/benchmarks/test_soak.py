# SPDX-License-Identifier: Apache-2.0
"""The soak's own judgement, on servers without a model: what is wrong with one is found."""

import json
import sys
from pathlib import Path

import pytest
import soak
from soak_parts import load, report, server

from redrafter_testing.benchmarks import fake_server

REQUESTS = "100"


@pytest.mark.parametrize(
    ("flaws", "failure"),
    [
        ((), None),
        (("--other-answers",), "differ from plain vLLM's"),
        (("--keeps-blocks",), "16 KV blocks were not freed"),
        (("--keeps-memory",), "more than plain vLLM's, and at most 40 were allowed"),
    ],
)
def test_a_server_passes_unless_it_has_a_flaw(
    flaws: tuple[str, ...], failure: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (sys.executable, "-P", fake_server.__file__)
    monkeypatch.setattr(server, "COMMAND", (*script, *flaws, "serve"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setattr(load, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(report, "MOST_GROWTH", 40.0)
    output = tmp_path / "soak.json"
    code = soak.main(["--requests", REQUESTS, "--logs", str(tmp_path), "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["sent"] == sum(found["kinds"].values()) == int(REQUESTS)
    assert found["answered"] + found["aborted"] == found["sent"]
    assert 0 < found["aborted"] < 30 and found["preemptions"] > 0
    assert code == len(found["failures"]) == (failure is not None)
    assert failure is None or failure in found["failures"][0]
