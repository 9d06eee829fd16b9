# SPDX-License-Identifier: Apache-2.0
"""Names of models are looked up here, then once and shortly at the hub."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from redrafter_testing.own_commands import refusal_of
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.hub import check_within_reach

TYPO = "someone/nothing"


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A hub that takes connections and never answers; its cache is empty."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", constants.ENDPOINT)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield


def test_what_is_here_or_a_path_is_not_asked_for(silent_hub: None, tmp_path: Path) -> None:
    (tmp_path / "cache" / "models--someone--cached").mkdir(parents=True)
    started = time.monotonic()
    check_within_reach(str(tmp_path), "target")
    check_within_reach("someone/cached", "target")
    for name in ("", "/no/such", "./no", "~/no"):
        with pytest.raises(ConfigError, match=rf"^target '{name}': no such folder; give"):
            check_within_reach(name, "target")
    assert time.monotonic() - started < 0.3


@pytest.mark.parametrize(
    ("what", "command"),
    [
        ("drafter", ["inspect", TYPO]),
        ("target", ["inspect", "/", "--target", TYPO]),
        ("target", ["train", TYPO, "--data", "/", "--output", "out"]),
        ("target", ["trace", TYPO, "--prompt", "Why?", "--html", "out.html"]),
        ("target", ["mlx-serve", TYPO]),
        ("drafter", ["mlx-serve", "/", "--drafter", TYPO]),
        ("drafter", ["demo", "--drafter", TYPO]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_a_name_that_is_not_within_reach_ends_a_command_soon_and_in_one_line(
    what: str, command: list[str], silent_hub: None
) -> None:
    started = time.monotonic()
    said = refusal_of(*command)
    assert time.monotonic() - started < 5, "the hub was asked again and again"
    assert f"{what} {TYPO!r}: no such folder, and not to be had from the hub" in said
    assert said.count("\n") == 1
