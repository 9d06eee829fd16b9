# SPDX-License-Identifier: Apache-2.0
"""What we rely on of vLLM is recorded; a vLLM that lacks it is refused, and another one warned of.

When vLLM changes: CONTRIBUTING.md, "Support the next vLLM version".
"""

import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import vllm
from packaging.requirements import Requirement

from vllm_redrafter import ConfigError
from vllm_redrafter.engine import vllm_interface
from vllm_redrafter.engine.vllm_interface import check_vllm, described

REPO = Path(__file__).parents[2]
RECORDING = runpy.run_path(str(REPO / "scripts" / "record_vllm.py"))
RECORDED = json.loads(vllm_interface.FILE.read_text())
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
ISSUES = PROJECT["urls"]["Issues"]
INSTALLED = Path(vllm.__file__).parents[1]


def test_the_record_is_what_the_script_writes_of_the_installed_vllm() -> None:
    found = {symbol: described(INSTALLED, symbol) for symbol in RECORDING["symbols"]()}
    version = RECORDING["version_of"](INSTALLED)
    assert version in RECORDED["versions"]
    assert json.dumps(RECORDING["with_version"](RECORDED, version, found)) == json.dumps(RECORDED)


def test_no_symbol_is_missing_in_the_newest_version_and_each_difference_has_been_judged() -> None:
    newest = list(RECORDED["versions"])[-1]
    known = {name: value for kind in RECORDING["KINDS"] for name, value in RECORDED[kind].items()}
    assert [name for name in known if RECORDING["at"](known[name], newest) is None] == []
    judged = [reason for reasons in RECORDED["versions"].values() for reason in reasons.values()]
    assert judged and all(reason.strip() for reason in judged)


def test_the_extras_install_recorded_versions_and_refuse_no_newer_one() -> None:
    extras = PROJECT["optional-dependencies"]
    cuda = Requirement(extras["cuda"][0]).specifier
    first = min(int(version.split(".")[1]) for version in RECORDED["versions"])
    assert [n for n in (first - 1, first, first + 9) if f"0.{n}.0" in cuda] == [first, first + 9]
    (cpu,) = Requirement(extras["cpu"][0]).specifier
    assert cpu.operator == "==" and cpu.version in RECORDED["versions"]


@pytest.mark.parametrize("engine", ["cpu", "v2"])
def test_what_is_installed_fits_silently_without_an_import_in_a_moment(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_redrafter.engine.log.logger", None)
    before, start = set(sys.modules), time.process_time()
    check_vllm(engine)
    assert time.process_time() - start < 1
    assert not [name for name in set(sys.modules) - before if name.startswith("vllm")]


@pytest.fixture
def future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another version: the installed files, to be changed by `edit`; its package's folder."""
    folder = tmp_path / "vllm"
    shutil.copytree(INSTALLED / "vllm", folder, copy_function=os.symlink)
    monkeypatch.setattr(vllm, "__file__", str(folder / "__init__.py"))
    monkeypatch.setattr(vllm, "__version__", "0.35.0")
    monkeypatch.setattr("vllm_redrafter.engine.log.logger", logging.getLogger("shown"))
    return folder


def edit(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert old in source
    file.unlink()
    file.write_text(source.replace(old, new))


OPS, RUNNER = "_custom_ops.py", "v1/worker/gpu_model_runner.py"
SPECULATOR = "v1/worker/gpu/spec_decode/speculator.py"
CLASS, ABSTRACT = (
    "class BaseSpeculator(ABC):\n",
    "    @abstractmethod\n    def warm_up(self): ...\n\n",
)
SPLITS, MORE = "    enable_kv_split: bool,\n", "    num_splits: int,\n"
CAUSAL = "    dynamic_causal: torch.Tensor | None = None,\n"
LAST, OPTIONAL = "        num_speculative_tokens: int | None = None,\n", "        extra: int = 0,\n"


@pytest.mark.parametrize(
    ("engine", "file", "old", "new", "message"),
    [
        ("cpu", RUNNER, "use_aux_hidden_state_outputs", "aux", r"\.use_aux_\w+ is missing\."),
        ("v2", SPECULATOR, CLASS, CLASS + ABSTRACT, "is class, abstract warm_up, .* was class, "),
        ("cpu", OPS, SPLITS, SPLITS + MORE, r"_metadata is \(.*, num_splits, .*\), and was \("),
        ("cpu", OPS, SPLITS, "", r"_metadata is \(.*\), and was \(.*, enable_kv_split, "),
        (
            "cpu",
            OPS,
            CAUSAL,
            "    extra: int = 0,\n" + CAUSAL,
            r"_metadata is \(.*, extra, dynamic_",
        ),
        # Ours stands in its place, and takes no such argument.
        ("v2", SPECULATOR, LAST, LAST + OPTIONAL, r"propose is \(.*, extra\), and was \("),
    ],
    ids=["renamed", "abstract", "asks-for-more", "takes-less", "reordered", "gives-more"],
)
def test_a_change_of_what_an_engine_relies_on_is_refused_by_name(
    engine: str, file: str, old: str, new: str, message: str, future: Path
) -> None:
    edit(future / file, old, new)
    with pytest.raises(ConfigError, match=message) as refused:
        check_vllm(engine)
    for part in ("vLLM 0.35.0", "It runs on 0.32 and 0.33: install one", ISSUES):
        assert part in str(refused.value)
    check_vllm("v2" if engine == "cpu" else "cpu")


def test_what_is_new_is_harmless_and_the_version_warned_of(
    future: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(
        future / OPS, *(f'    kv_cache_dtype: str = "auto",\n{end}' for end in (")", "    x=1,\n)"))
    )
    edit(future / RUNNER, "class GPUModelRunner(", "class New: ...\n\n\nclass GPUModelRunner(")
    check_vllm("cpu")
    (said,) = caplog.messages
    assert "tested on vLLM 0.32 and 0.33, not on 0.35.0; what it relies on is there." in said
    assert said.endswith(ISSUES)


def test_files_that_are_not_python_are_not_known_to_fit(
    future: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (future / "sampling_params.py").unlink()
    (future / "sampling_params.abi3.so").write_bytes(b"\x7fELF\x02\x00\x00")
    check_vllm("cpu")
    assert "could not be looked up" in caplog.text


def test_the_plugin_imports_nothing_of_vllm_that_engine_arguments_do_not() -> None:
    code = (
        "import sys, vllm.engine.arg_utils; before = set(sys.modules);"
        "from vllm_redrafter.plugin import register; register();"
        "print([m for m in set(sys.modules) - before if m.startswith('vllm.')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_what_is_in_a_file_is_read_without_running_it(tmp_path: Path) -> None:
    module = tmp_path / "vllm" / "thing.py"
    module.parent.mkdir()
    module.write_text(
        "from abc import abstractmethod\n1 / 0\n\n"
        "class A(B):\n    x: int = 1\n    v: int\n    def f(self, y, *, z=2, **k): self.w = y.u\n"
        "    @property\n    @abstractmethod\n    def g(self): ...\n"
        "    def h(*a, b): super().h()\n\nC = 3\n"
    )
    found = {
        "vllm.thing:A": "class, abstract g",
        "vllm.thing:A.f": "(self, y, *, z, **k)",
        "vllm.thing:A.h": "(*a, b)",
        **dict.fromkeys(
            ("vllm.thing:A.x", "vllm.thing:A.v", "vllm.thing:A.w", "vllm.thing:C"), "value"
        ),
        "vllm:thing": "module",
        **dict.fromkeys(("vllm.thing:A.u", "vllm.thing:D", "vllm.thing:D.x", "vllm.other:E")),
    }
    assert {symbol: described(tmp_path, symbol) for symbol in found} == found
