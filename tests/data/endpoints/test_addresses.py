# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers, with commas between them."""

import pytest

from vllm_redrafter.data.endpoints.addresses import parsed_addresses
from vllm_redrafter.utils.errors import ConfigError


def test_each_server_is_there_once_and_without_a_path_of_the_api() -> None:
    given = "http://a:8000/, http://b:8000/v1/,https://d/prefix/v1,http://a:8000"
    assert parsed_addresses(given) == ["http://a:8000", "http://b:8000", "https://d/prefix"]


@pytest.mark.parametrize(
    "wrong", ["", "localhost:8000", "ftp://a:1", "http://", "http://a:port", "http://a:1?x=1"]
)
def test_what_is_no_address_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"--endpoint .*: not the address of a server; give one"):
        parsed_addresses(f"http://a:1,{wrong}")
