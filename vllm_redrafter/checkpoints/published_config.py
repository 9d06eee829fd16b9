# SPDX-License-Identifier: Apache-2.0
"""config.json of published speculators (`heads/speculators.py`), in our words.

All say `model_type` mlp_speculator. Which cell it is, `method` alone tells: `architectures` is the
same for Arctic's two, and a string or a list. Keys and defaults are those of fms-extras
(`fms_extras/models/hf/modeling_mlp_speculator.py`) and ArcticTraining
(`projects/arctic_lstm_speculator/speculator/configs.py`).
"""

from collections.abc import Mapping
from typing import Any

from vllm_redrafter.heads.speculators import LstmSpeculatorConfig, MlpSpeculatorConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

MODEL_TYPE = "mlp_speculator"
_METHODS = {"sum_rnn": MlpSpeculatorConfig, "sum_lstm": LstmSpeculatorConfig}
_TREE = {"proposal_type": METHOD, "speculative_tokens": 12, "beam_width": 4}
"""Which they do not record; its levels are those that they were trained for."""


def own_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A config.json in our words; one that is not of `MODEL_TYPE` is in them.

    A ConfigError, which names `where`, says what is not read here.
    """
    if values.get("model_type") != MODEL_TYPE:
        return dict(values)
    kind = _METHODS.get(method := str(values.get("method", "sum_rnn")))
    if kind is None:
        raise ConfigError(
            f"{where}: method {method!r} in config.json; the speculators that are read here are "
            f"{' and '.join(_METHODS)}: take one of those"
        )
    # In Arctic's form emb_dim is the width of the table, in IBM's the target's.
    is_arctic = "input_hidden_dim" in values
    hidden = _width(values, "input_hidden_dim" if is_arctic else "emb_dim", 4096, where)
    width = _width(values, "inner_dim", 0, where) or hidden
    for name in ("proj_dim", "emb_dim") if is_arctic else ():
        if (other := _width(values, name, width, where)) != width:
            raise ConfigError(
                f"{where}: {name} {other} in config.json must be inner_dim, {width}: take a "
                "speculator of one width"
            )
    switches = [name for name in ("tie_weights", "tie_lstm_embs") if values.get(name) is not True]
    if method == "sum_lstm" and switches:
        raise ConfigError(
            f"{where}: {' and '.join(switches)} must be true in config.json: of sum_lstm, only "
            "speculators with one table and one output layer are read; take such a one"
        )
    levels = values.get("n_predict", 3)
    return {
        "model_type": kind.model_type,
        "vocab_size": values.get("vocab_size", 32_000),
        "hidden_size": hidden,
        "width": width,
        "num_levels": levels,
        "tied": values.get("tie_weights", False),
        "scale_input": values.get("scale_input", False),
        "speculators_config": {
            "verifier": {"name_or_path": values.get("base_model_name_or_path")},
            "proposal_methods": [_TREE | {"beam_length": levels}],
        },
    }


def _width(values: Mapping[str, Any], name: str, default: int, where: str) -> int:
    """ArcticTraining writes a width as a string, with a dot between those of several layers."""
    value = values.get(name, default)
    widths = value if isinstance(value, list) else [value]
    if len(widths) == 1 and str(widths[0]).isdecimal():
        return int(widths[0])
    raise ConfigError(
        f"{where}: {name} {value!r} in config.json must be one number: a speculator of several "
        "layers is not read here; take one with one layer"
    )
