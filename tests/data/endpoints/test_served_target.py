# SPDX-License-Identifier: Apache-2.0
"""A server that serves something else is found out before it is asked for data."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_redrafter.data.endpoints.client import EndpointClient, EndpointDown
from vllm_redrafter.data.endpoints.engine import parsed_addresses
from vllm_redrafter.data.endpoints.served_target import ServedTarget
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError


@pytest.fixture
def check(target: Path, tmp_path: Path, serve: Callable[..., Any]) -> Callable[..., str]:
    """The name of the target at a server of these values."""

    def look(length: int | None = None, served_name: str | None = None, **values: Any) -> str:
        async def ask() -> str:
            client = EndpointClient(serve(**values).address, SamplingSettings(), seconds=10.0)
            try:
                return await served.check(client)
            finally:
                await client.close()

        served = ServedTarget(Target.open(target), length, served_name, tmp_path)
        return asyncio.run(ask())

    return look


def test_the_target_is_known_by_its_name_or_its_folder_s(check: Callable[..., str]) -> None:
    assert check(length=200, max_model_len=200) == check() == "target"
    assert check(name="org/target", root="elsewhere") == "org/target"
    assert check(name="alias", root="/models/target/") == "alias"
    assert check(name="alias", root="elsewhere", served_name="alias") == "alias"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "other", "root": "/models/other"}, "serves 'other' .*, not '.*target'; if that"),
        ({"served_name": "alias"}, "serves 'target' .*, not 'alias'"),
        ({"max_model_len": 511}, "allows 511 tokens, and 512 may be asked for: give --max-model-l"),
        ({"failure": lambda body: (400, "too much")}, "refuses a request: .*too much"),
        ({"failure": lambda body: (401, "who?")}, r"who\?.*its key goes into OPENAI_API_KEY"),
    ],
)
def test_what_does_not_fit_is_named(
    check: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"endpoint http://127\.0\.0\.1:\d+ .*{message}"):
        check(**values)


def test_another_tokenizer_is_noticed(check: Callable[..., str], tokenizer: Any) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["tower"])
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*: the same text begins"):
        check(tokenizer=other)


def test_other_weights_than_the_first_server_s_are_noticed(check: Callable[..., str]) -> None:
    for _ in range(2):
        assert check(weights=0) == "target"
    with pytest.raises(ConfigError, match=r"has other weights than http.*by 0\.\d\d nats on aver"):
        check(weights=1)


def test_what_is_no_server_of_vllm_s_is_down(check: Callable[..., str]) -> None:
    with pytest.raises(EndpointDown, match="its answer is not vLLM's"):
        check(change=lambda completion: completion.pop("choices"))
    with pytest.raises(EndpointDown, match=r"status 503: .*loading"):
        check(failure=lambda body: (503, "loading"))


def test_each_server_is_there_once_and_without_a_path_of_the_api() -> None:
    given = "http://a:8000/, http://b:8000/v1/,https://d/prefix/v1,http://a:8000"
    assert parsed_addresses(given) == ["http://a:8000", "http://b:8000", "https://d/prefix"]
    for wrong in ("", "localhost:8000", "ftp://a:1", "http://", "http://a:port", "http://a:1?x=1"):
        with pytest.raises(ConfigError, match=r"--endpoint .*: not the address of a server; give"):
            parsed_addresses(f"http://a:1,{wrong}")
