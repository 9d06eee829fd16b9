# SPDX-License-Identifier: Apache-2.0
"""Which of the two serves, by what is installed."""

import subprocess
import sys

import pytest

from vllm_redrafter.cli.serving_backend import require_mlx, serving_backend
from vllm_redrafter.utils.errors import ConfigError

MISSING = ("vllm", "triton", "datasets", "pyarrow", "accelerate", "psutil", "gguf", "llguidance")

SCRIPT = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
import vllm_redrafter.cli.main
import vllm_redrafter.cli.chat.run
import vllm_redrafter.cli.demo.smollm2
import vllm_redrafter.cli.demo.mlx_engine
import vllm_redrafter.mlx.serve
print(vllm_redrafter.cli.main.serving_backend())
"""


def test_what_serves_with_mlx_on_a_mac_needs_no_vllm() -> None:
    pytest.importorskip("mlx_lm")
    command = [sys.executable, "-P", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "mlx\n", done.stderr


def test_vllm_serves_where_it_is_installed_and_else_mlx() -> None:
    for packages, backend in ({"vllm", "mlx_lm"}, "vllm"), ({"mlx", "mlx_lm"}, "mlx"):
        assert serving_backend(packages.__contains__) == backend
    with pytest.raises(ConfigError, match=r"vllm-redrafter\[cpu\].*'.\[mlx\]'"):
        serving_backend(lambda package: False)


@pytest.mark.parametrize("packages", [set(), {"mlx"}, {"mlx_lm"}])
def test_a_part_of_mlx_that_is_missing_is_named_with_the_remedy(packages: set[str]) -> None:
    with pytest.raises(ConfigError, match=r"pip install '.\[mlx\]'") as refused:
        require_mlx(packages.__contains__)
    named = str(refused.value).split(" not installed")[0].split(" and ")
    assert set(named) == {"mlx", "mlx_lm"} - packages
    require_mlx({"mlx", "mlx_lm"}.__contains__)
