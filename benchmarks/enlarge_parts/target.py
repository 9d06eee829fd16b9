# SPDX-License-Identifier: Apache-2.0
"""A Llama of larger sizes with the logits of a small one.

The hidden state is the small one's H numbers, a constant, and zeros: x' = [x ; c ; 0]. Then

- RMSNorm's mean is over H' numbers, so that its weights are multiplied by sqrt(H / H') and its
  epsilon by H / H'; the constant is too small to be noticed.
- A head's numbers lie where RoPE turns them as before: pair i of the small head's frequencies is
  pair i d'/d of the large one's. Scores are over sqrt(d'), so that queries grow by sqrt(d' / d).
- Further heads, rows of the MLP and layers are multiplied by random weights, so that they cost what
  they cost, and what they give meets zeros.
- Tokens that the small vocabulary has not read the constant alone, times a large negative weight:
  they are never likely.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_redrafter import ConfigError

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
CONSTANT = 2.0**-12
"""Of hidden states: against the small model's numbers nothing in a sum of squares."""

UNLIKELY = -(2.0**22)
"""Times the constant over the hidden state's size: a logit of minus hundreds or thousands."""

WEIGHTS = "model.safetensors"


class Filler:
    """Random weights of any size, drawn once: layers need not differ to take their time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._drawn = (0.02 * torch.randn(2**22, generator=torch.manual_seed(0))).to(dtype)

    def __call__(self, rows: int, columns: int) -> Tensor:
        repeats = -(-rows * columns // self._drawn.numel())
        return self._drawn.repeat(repeats)[: rows * columns].view(rows, columns)


def enlarge_target(
    source: Path, output: Path, shape: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Any, Any]:
    """Write the target: a file of weights per layer, and the source's tokenizer.

    The folder `output` is made; `shape` has sizes by LlamaConfig's names. Returned are the small
    target's config and the large one's. A ConfigError where the source holds no plain Llama with
    its weights in one file, or not the smaller one.
    """
    from transformers import AutoConfig, LlamaConfig

    try:
        config, read = AutoConfig.from_pretrained(source), load_file(source / WEIGHTS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no target in {source}: {error}") from error
    large = LlamaConfig(
        **shape,
        tie_word_embeddings=False,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / shape["hidden_size"],
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        rope_parameters=config.rope_parameters,
        dtype=dtype,
    )
    large.architectures = ["LlamaForCausalLM"]
    check(config, large)
    output.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin"):
            shutil.copy(file, output)
    large.save_pretrained(output)
    weights = {name: tensor.to(dtype) for name, tensor in read.items()}
    found: dict[str, str] = {}
    for number, tensors in enumerate(enlarged_weights(weights, config, large, Filler(dtype))):
        file_name = f"model-{number:05d}.safetensors"
        save_file(tensors, output / file_name, metadata={"format": "pt"})
        found |= dict.fromkeys(tensors, file_name)
    index = {"metadata": {}, "weight_map": found}
    (output / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return config, large


def check(small: Any, large: Any) -> None:
    """Raise a ConfigError where the sizes do not fit into each other."""
    if small.model_type != "llama" or small.attention_bias or small.mlp_bias:
        raise ConfigError(f"the target is a {small.model_type}, or has biases: expected a Llama")
    if small.rope_parameters["rope_type"] != "default":
        raise ConfigError(f"the target's RoPE is {small.rope_parameters}: expected the default one")
    if large.head_dim % small.head_dim:
        raise ConfigError(
            f"the target's heads have {small.head_dim} numbers, which does not divide "
            f"{large.head_dim}: RoPE could not turn them as before"
        )
    names = ("vocab_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads")
    sizes = [(name, getattr(small, name), getattr(large, name)) for name in names]
    sizes += [
        ("hidden_size and the constant", small.hidden_size + 1, large.hidden_size),
        ("query heads of a KV head", _group(small), _group(large)),
    ]
    for name, its, larger in sizes:
        if its > larger:
            raise ConfigError(f"the target's {name}: {its} exceeds the shape's {larger}")


def _group(config: Any) -> int:
    return config.num_attention_heads // config.num_key_value_heads


def enlarged_weights(
    weights: Mapping[str, Tensor], small: Any, large: Any, filler: Filler
) -> Iterator[dict[str, Tensor]]:
    """The large target's tensors: those around its layers, then layer by layer."""
    hidden, vocabulary = small.hidden_size, small.vocab_size
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    table = embedding.new_zeros(large.vocab_size, large.hidden_size)
    table[:vocabulary, :hidden] = embedding
    table[:, hidden] = CONSTANT
    norm = _norm(weights["model.norm.weight"], large.hidden_size)
    norm[hidden] = 1.0
    yield {
        "model.embed_tokens.weight": table,
        "model.norm.weight": norm,
        "lm_head.weight": vocabulary_rows(head, large.vocab_size, large.hidden_size, filler),
    }
    for layer in range(large.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        of_layer = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        made = _layer(of_layer, small, large, filler)
        yield {prefix + name: tensor for name, tensor in made.items()}


def vocabulary_rows(head: Tensor, rows: int, columns: int, filler: Filler) -> Tensor:
    """A layer as wide as the vocabulary: the small one's, and unlikely tokens."""
    tokens, hidden = head.shape
    made = filler(rows, columns)
    made[:, : hidden + 1] = 0
    made[:tokens, :hidden] = head
    made[tokens:, hidden] = UNLIKELY
    return made


def _norm(weight: Tensor, hidden: int) -> Tensor:
    made = weight.new_zeros(hidden)
    made[: len(weight)] = weight * (len(weight) / hidden) ** 0.5
    return made


def _layer(
    weights: Mapping[str, Tensor], small: Any, large: Any, filler: Filler
) -> dict[str, Tensor]:
    """A layer's tensors, by name; of one that the small target has not, `weights` is empty."""
    hidden, wide = large.hidden_size, large.intermediate_size
    widths = {
        "self_attn.q_proj": large.num_attention_heads * large.head_dim,
        "self_attn.k_proj": large.num_key_value_heads * large.head_dim,
        "self_attn.v_proj": large.num_key_value_heads * large.head_dim,
        "mlp.gate_proj": wide,
        "mlp.up_proj": wide,
    }
    made = {f"{name}.weight": filler(rows, hidden) for name, rows in widths.items()}
    first = next(iter(made.values()))
    made["self_attn.o_proj.weight"] = first.new_zeros(hidden, widths["self_attn.q_proj"])
    made["mlp.down_proj.weight"] = first.new_zeros(hidden, wide)
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    if not weights:
        return made | {name: first.new_ones(hidden) for name in norms}
    keys, of_key = torch.arange(small.num_key_value_heads), torch.arange(_group(small))
    key_heads = _head_rows(keys, small, large)
    query_heads = _head_rows((keys[:, None] * _group(large) + of_key).flatten(), small, large)
    inner = torch.arange(small.intermediate_size)
    grown = (large.head_dim / small.head_dim) ** 0.5
    _place(made["self_attn.q_proj.weight"], query_heads, weights["self_attn.q_proj.weight"] * grown)
    # A small head's numbers are not all of a large one's; the others must not count in scores.
    made["self_attn.k_proj.weight"][: len(keys) * large.head_dim] = 0
    _place(made["self_attn.k_proj.weight"], key_heads, weights["self_attn.k_proj.weight"])
    _place(made["self_attn.v_proj.weight"], key_heads, weights["self_attn.v_proj.weight"])
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        _place(made[name], inner, weights[name])
    _place(made["self_attn.o_proj.weight"].T, query_heads, weights["self_attn.o_proj.weight"].T)
    _place(made["mlp.down_proj.weight"].T, inner, weights["mlp.down_proj.weight"].T)
    return made | {name: _norm(weights[name], hidden) for name in norms}


def _head_rows(heads: Tensor, small: Any, large: Any) -> Tensor:
    """Where the small heads' rows are in a large projection: int64, by the small one's row.

    `heads` are the large one's heads, by the small one's.
    """
    half = small.head_dim // 2
    pairs = torch.arange(half) * (large.head_dim // small.head_dim)
    within = torch.cat([pairs, pairs + large.head_dim // 2])
    return (heads[:, None] * large.head_dim + within).flatten()


def _place(large: Tensor, rows: Tensor, small: Tensor) -> None:
    """Rows of a small matrix in a large one; the rest of these rows is zero."""
    large[rows] = 0
    large[rows, : small.shape[1]] = small
