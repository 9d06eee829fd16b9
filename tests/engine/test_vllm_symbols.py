"""vLLM's classes, methods and fields that we rely on are as recorded, in every supported version.

When vLLM changes: read what changed, adapt, then record with redrafter_testing/vllm_symbols.py.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from redrafter_testing import vllm_symbols
from vllm_redrafter import names

RECORDED = json.loads(vllm_symbols.RECORDED.read_text())

HARMLESS = {
    "vllm.config.cache:CacheConfig.cache_dtype",  # only compared, as a string
    # Only named in a docstring; the argument that is new has a default.
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.postprocess_sampled",
    # Only wrapped, where it exists.
    "vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_v1",
}
"""What differs between versions without concerning us."""

ABSENT = {"0.32.0": ["vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_v1"]}
"""What a version need not have."""


def installed_root() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def test_the_installed_vllm_is_as_recorded() -> None:
    import vllm

    version = vllm.__version__.partition("+")[0]
    found = vllm_symbols.signatures(installed_root(), vllm_symbols.names())
    assert found == RECORDED[version]


def test_every_supported_version_is_recorded() -> None:
    assert {version.rpartition(".")[0] for version in RECORDED} == set(names.SUPPORTED_VLLM)


@pytest.mark.parametrize("version", RECORDED)
def test_every_symbol_that_we_use_exists(version: str) -> None:
    assert RECORDED[version].keys() == set(vllm_symbols.names())
    missing = [name for name, found in RECORDED[version].items() if found is None]
    assert missing == ABSENT.get(version, [])


def test_versions_agree_on_what_we_use() -> None:
    oldest, *others = RECORDED.values()
    for other in others:
        assert {name for name in oldest if oldest[name] != other[name]} == HARMLESS


def test_what_is_missing_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "vllm" / "thing.py"
    module.parent.mkdir()
    module.write_text(
        "class A(B):\n    x: int = 1\n    def f(self, y, *, z=2): self.w = y\n\nC = 3\n"
    )
    names = ["vllm.thing:A", "vllm.thing:A.f", "vllm.thing:A.x", "vllm.thing:A.w"]
    names += ["vllm.thing:C", "vllm:thing", "vllm.thing:A.g", "vllm.thing:D", "vllm.other:E"]
    assert list(vllm_symbols.signatures(tmp_path, names).values()) == [
        "class(B)",
        "(self, y, *, z=2)",
        "int",
        "attribute",
        "value",
        "module",
        None,
        None,
        None,
    ]
