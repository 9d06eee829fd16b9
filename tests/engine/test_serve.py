# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter serve`, which test_chat.py talks to."""

from functools import partial
from importlib import metadata
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm.entrypoints.cli.serve import ServeSubcommand

from vllm_redrafter.cli.main import app


def test_arguments_reach_vllms_server_where_no_distribution_is_named_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", served.append)
    found = metadata.distribution
    hidden = {"vllm": "no-vllm"}
    monkeypatch.setattr(metadata, "distribution", lambda name: found(hidden.get(name) or name))
    invoke = partial(CliRunner().invoke, app)
    given = ["T", "--spec-model", "D", "-tp", "2", "--max-model-len=1k"]
    assert invoke(["serve", *given]).exit_code == 0
    (one,) = served
    assert (one.model_tag, one.tensor_parallel_size, one.max_model_len) == ("T", 2, 1000)
    refused = invoke(["serve", "T", "--no-such-option"])
    assert refused.exit_code == 2 and "unrecognized arguments: --no-such-option" in refused.stderr
    assert "vllm serve [model_tag] [options]" in invoke(["serve", "--help"]).stdout
