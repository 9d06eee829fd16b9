"""Where the servers are: addresses, and files of addresses that may change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from vllm_redrafter.utils.errors import ConfigError


class AddressBook:
    """The addresses that `--endpoint` gives.

    Args:
        given: each an address (http://host:8000, with /v1 or without), or a file with one in each
            line; a file's blank lines and those that begin with # are skipped.

    Raises:
        ConfigError: one is neither, or there is none at all.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self._given = list(given)
        self.has_files = any("://" not in each for each in given)
        if not self.read():
            raise ConfigError(f"--endpoint {', '.join(given)}: has no address of a server")

    def read(self) -> list[str]:
        """All addresses, each once and in order; files are read again.

        Raises:
            ConfigError: a file cannot be read, or something is no address.
        """
        found: list[str] = []
        for each in self._given:
            found += [_address(each, each)] if "://" in each else _lines(each)
        return list(dict.fromkeys(found))


def _lines(name: str) -> list[str]:
    try:
        lines = Path(name).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--endpoint {name}: neither an address such as http://localhost:8000 nor a file with "
            f"one in each line: {error}"
        ) from error
    stripped = (line.strip() for line in lines)
    return [_address(line, f"{name}: {line}") for line in stripped if line and line[0] != "#"]


def _address(text: str, where: str) -> str:
    """Without a slash or /v1 at its end."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(
            f"--endpoint {where}: not the address of a server; give one such as "
            "http://localhost:8000"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")
