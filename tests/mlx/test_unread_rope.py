# SPDX-License-Identifier: Apache-2.0
"""A target whose rope mlx-lm would take for another is refused, with the line that mends it."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_redrafter.utils.errors import ConfigError

pytest.importorskip("mlx.core")

from mlx_lm.utils import load_model

from vllm_redrafter.mlx.target import check_rope


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_a_base_that_mlx_lm_does_not_read_is_refused_until_it_does(
    theta: float, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, values = load_model(tmp_path)
    if theta == model.args.rope_theta:
        check_rope("target", values, model.args)
        return
    with pytest.raises(ConfigError, match=r'write "rope_theta": 500000.0 into its config.json'):
        check_rope("target", values, model.args)
    (tmp_path / "config.json").write_text(json.dumps(values | {"rope_theta": theta}))
    mended, values = load_model(tmp_path)
    check_rope("target", values, mended.args)
    assert mended.args.rope_theta == theta
