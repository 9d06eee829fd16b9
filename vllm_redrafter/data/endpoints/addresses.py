# SPDX-License-Identifier: Apache-2.0
"""The addresses of servers, as `--endpoint` takes them."""

from __future__ import annotations

from urllib.parse import urlsplit

from vllm_redrafter.utils.errors import ConfigError


def parsed_addresses(text: str) -> list[str]:
    """From `URL[,URL...]`: each address once and in order, without a slash or /v1 at its end.

    Raises:
        ConfigError: something is no address.
    """
    return list(dict.fromkeys(_address(each.strip()) for each in text.split(",")))


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(
            f"--endpoint {text}: not the address of a server; give one such as "
            "http://localhost:8000, or several with commas between them"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")
