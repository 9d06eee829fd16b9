"""Addresses of servers, given one by one or in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_redrafter.data.endpoints.addresses import AddressBook
from vllm_redrafter.utils.errors import ConfigError


def test_addresses_and_files_give_each_server_once(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# the first rack\nhttp://b:8000/v1/\n\n  http://c:8000 \nhttp://a:8000\n")
    book = AddressBook(["http://a:8000/", str(file), "https://d/prefix/v1"])
    assert book.read() == ["http://a:8000", "http://b:8000", "http://c:8000", "https://d/prefix"]
    assert book.has_files
    file.write_text("http://e:1\n")
    assert book.read() == ["http://a:8000", "http://e:1", "https://d/prefix"]
    assert not AddressBook(["http://a:8000"]).has_files


@pytest.mark.parametrize("wrong", ["ftp://a:1", "http://", "http://a:port", "http://a:1?x=1"])
def test_what_is_no_address_is_named(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--endpoint .*: not the address of a server; give one"):
        AddressBook([wrong])
    (tmp_path / "servers").write_text(f"http://a:1\n{wrong}\n")
    with pytest.raises(ConfigError, match=r"servers: .*: not the address of a server"):
        AddressBook([str(tmp_path / "servers")])


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="localhost:8000: neither an address such as http://lo"):
        AddressBook(["localhost:8000"])
    (tmp_path / "servers").write_text("# none yet\n")
    with pytest.raises(ConfigError, match="servers: has no address of a server"):
        AddressBook([str(tmp_path / "servers")])
