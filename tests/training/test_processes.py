# SPDX-License-Identifier: Apache-2.0
"""What `accelerate launch` may be told."""

import pytest

from vllm_redrafter.training.processes import make_accelerator
from vllm_redrafter.utils.errors import ConfigError


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_accelerate_s_own_sharding_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ConfigError, match=r"start without it; .* --hidden-states"):
        make_accelerator()
