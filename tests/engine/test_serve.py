# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter serve`, which test_chat.py talks to."""

from importlib import metadata
from typing import Any

import pytest
from vllm.config import SpeculativeConfig
from vllm.entrypoints.cli.serve import ServeSubcommand

from redrafter_testing.own_commands import printed_by, refusal_of


def test_arguments_reach_vllms_server_where_no_distribution_is_named_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", served.append)
    found = metadata.distribution
    monkeypatch.setattr(metadata, "distribution", lambda n: found("no" if n == "vllm" else n))
    given = ["T", "--spec-model", "D", "-tp", "2", "--port=9"]
    assert not printed_by("serve", *given)
    assert [(s.model_tag, s.tensor_parallel_size, s.port) for s in served] == [("T", 2, 9)]
    assert "vllm serve [model_tag] [options]" in printed_by("serve", "--help")


def test_a_value_that_vllm_refuses_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        SpeculativeConfig(num_speculative_tokens=0)

    monkeypatch.setattr(ServeSubcommand, "cmd", start)
    said = "error: SpeculativeConfig: num_speculative_tokens: Input should be greater than 0\n"
    assert refusal_of("serve", "T") == said
