"""A server that serves something else is found out before it is asked for data."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.fake_engine import APPENDING, REWRITING
from vllm_redrafter.data.endpoints.client import EndpointClient, EndpointDown
from vllm_redrafter.data.endpoints.served_target import ServedTarget
from vllm_redrafter.data.generation_settings import (
    EndpointSettings,
    GenerationSettings,
    SamplingSettings,
)
from vllm_redrafter.utils.errors import ConfigError

SETTINGS = GenerationSettings()


@pytest.fixture
def check(target: Path, tmp_path: Path, serve: Callable[..., Any]) -> Callable[..., str]:
    """The name of the target at a server of these values."""

    def look(
        settings: GenerationSettings = SETTINGS, served_name: str | None = None, **values: Any
    ) -> str:
        async def ask() -> str:
            client = EndpointClient(serve(**values).address, settings.sampling, LIMITS)
            try:
                return await served.check(client)
            finally:
                await client.close()

        served = ServedTarget(str(target), settings, served_name, tmp_path)
        return asyncio.run(ask())

    return look


LIMITS = EndpointSettings(request_timeout=10.0)


def test_the_target_is_known_by_its_name_or_its_folder_s(check: Callable[..., str]) -> None:
    assert check() == "target"
    assert check(name="org/target", root="elsewhere") == "org/target"
    assert check(name="alias", root="/models/target/") == "alias"
    assert check(name="alias", root="elsewhere", served_name="alias") == "alias"


def test_a_server_that_takes_any_number_for_a_token_says_nothing_of_its_vocabulary(
    check: Callable[..., str],
) -> None:
    assert check(vocab_size=2**40) == "target"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "other", "root": "/models/other"}, "serves 'other' .*, not '.*target'; if that"),
        ({"served_name": "alias"}, "serves 'target' .*, not 'alias'"),
        ({"vocab_size": 511}, "a model with fewer tokens than the 512 of"),
        ({"vocab_size": 513}, "a model with more tokens than the 512 of"),
        (
            {"max_model_len": 256},
            "allows 256 tokens, and the target's config.json says 512: give -",
        ),
        ({"max_model_len": 1024}, "allows 1024 tokens, and the target's config.json says 512"),
        (
            {
                "failure": lambda body: (
                    (400, "at most 1 is allowed") if "prompt_logprobs" in body else None
                )
            },
            "refuses a request: .*at most 1 is allowed",
        ),
        (
            {"failure": lambda body: (401, "who are you?")},
            "who are you.*its key goes into OPENAI_A",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    check: Callable[..., str], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"endpoint http://127\.0\.0\.1:\d+ .*{message}"):
        check(**values)


def test_another_template_or_tokenizer_is_noticed(
    check: Callable[..., str], tokenizer: Any
) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = APPENDING.replace("assistant", "model")
    with pytest.raises(
        ConfigError, match=r"has another chat template than .*: the same text is \d+"
    ):
        check(tokenizer=other)
    other.chat_template = REWRITING
    with pytest.raises(ConfigError, match="has another chat template than"):
        check(tokenizer=other)
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["tower"])
    with pytest.raises(ConfigError, match="has another tokenizer than"):
        check(tokenizer=other)


def test_a_length_that_is_given_is_all_that_servers_have_to_allow(
    check: Callable[..., str],
) -> None:
    settings = replace(SETTINGS, sampling=SamplingSettings(max_model_len=200))
    for allowed in (200, 512, 1024):
        assert check(settings, max_model_len=allowed) == "target"
    with pytest.raises(ConfigError, match="allows 199 tokens, and --max-model-len says 200: give"):
        check(settings, max_model_len=199)


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
