# SPDX-License-Identifier: Apache-2.0
"""What commands need beside this package."""

import sys

import pytest

from redrafter_testing import process_trees
from vllm_redrafter.cli.installed import require
from vllm_redrafter.utils.errors import ConfigError

MISSING = ("vllm", "triton", "datasets", "pyarrow", "accelerate", "psutil", "gguf", "llguidance")

SCRIPT = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
import vllm_redrafter.cli.main
import vllm_redrafter.cli.chat.conversation
import vllm_redrafter.mlx.serve
"""


def test_what_serves_with_mlx_on_a_mac_needs_no_vllm() -> None:
    pytest.importorskip("mlx_lm")
    process_trees.output_of([sys.executable, "-P", "-c", SCRIPT])


def test_what_is_missing_is_named_with_the_remedy() -> None:
    require("json", "re", remedy="none")
    with pytest.raises(ConfigError, match=r"^no_json and no_re not installed: get them$"):
        require("no_json", "re", "no_re", remedy="get them")
