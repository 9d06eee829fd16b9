# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes, methods and fields that we rely on are as recorded, in every supported version.

When vLLM changes: CONTRIBUTING.md, "Support the next vLLM version".
"""

import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from redrafter_testing import vllm_symbols
from redrafter_testing.vllm_options import vllm_folder
from vllm_redrafter.utils.names import SUPPORTED_VLLM

RECORDS = vllm_symbols.read_records()
PYPROJECT = vllm_symbols.PACKAGE.parent / "pyproject.toml"


def test_the_installed_vllm_is_as_recorded() -> None:
    import vllm

    version = vllm.__version__.partition("+")[0]
    found = vllm_symbols.signatures(vllm_folder().parent, vllm_symbols.names())
    assert found == RECORDS[version].symbols


@pytest.mark.parametrize("version", RECORDS)
def test_every_symbol_that_we_use_exists_and_every_difference_has_been_judged(version: str) -> None:
    record = RECORDS[version]
    assert record.symbols.keys() == set(vllm_symbols.names())
    missing = [name for name, found in record.symbols.items() if found is None]
    assert missing == list(record.absent)
    assert vllm_symbols.unjudged(record) == []


@pytest.mark.parametrize(("before", "version"), list(pairwise(RECORDS)))
def test_versions_agree_on_what_we_use(before: str, version: str) -> None:
    old, new = RECORDS[before].symbols, RECORDS[version].symbols
    assert {name for name in old if old[name] != new[name]} == set(RECORDS[version].differences)


def test_the_extras_install_supported_versions_which_are_recorded() -> None:
    assert {version.rpartition(".")[0] for version in RECORDS} == set(SUPPORTED_VLLM)
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    cuda = Requirement(extras["cuda"][0]).specifier
    minors = [int(version.removeprefix("0.")) for version in SUPPORTED_VLLM]
    around = range(min(minors) - 1, max(minors) + 2)
    assert [n for n in around if f"0.{n}.0" in cuda and f"0.{n}.9" in cuda] == minors
    assert not [n for n in around if n not in minors and f"0.{n}.9" in cuda]
    (cpu,) = Requirement(extras["cpu"][0]).specifier
    assert cpu.operator == "==" and cpu.version in RECORDS


def test_what_is_missing_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "vllm" / "thing.py"
    module.parent.mkdir()
    module.write_text(
        "class A(B):\n    x: int = 1\n    def f(self, y, *, z=2): self.w = y\n\nC = 3\n"
    )
    found = {
        "vllm.thing:A": "class(B)",
        "vllm.thing:A.f": "(self, y, *, z=2)",
        "vllm.thing:A.x": "int",
        "vllm.thing:A.w": "attribute",
        "vllm.thing:C": "value",
        "vllm:thing": "module",
        **dict.fromkeys(("vllm.thing:A.g", "vllm.thing:D", "vllm.other:E")),
    }
    assert vllm_symbols.signatures(tmp_path, list(found)) == found
