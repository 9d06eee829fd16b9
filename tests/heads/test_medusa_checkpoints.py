# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Medusa's heads: FasterDecoding's and vLLM's, read, converted and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrafter_testing.models.medusa_heads import HEADS, KEPT, SIZES, VLLM, H, V, medusa, write
from vllm_redrafter import ConfigError, load_drafter
from vllm_redrafter.checkpoints.conversion import convert
from vllm_redrafter.checkpoints.inspection import inspect_checkpoint
from vllm_redrafter.heads.medusa import MedusaHead

PUBLISHED = {
    # Of five heads; the published ones say 2 as well.
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "transformers_version": "4.31.0",
}


def faster_decoding(head: MedusaHead) -> dict[str, Tensor]:
    """The tensors as FasterDecoding's training writes them."""
    blocks, last = {}, head.config.num_draft_layers
    for name, tensor in head.state_dict().items():
        _, number, *rest = name.split(".")
        if rest[0] == "layers":
            blocks[f"{number}.{rest[1]}.linear.{rest[2]}"] = tensor
        else:
            blocks[f"{number}.{last}.weight"] = tensor
    return blocks


def assert_tensors(found: nn.Module, expected: nn.Module) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("sizes", ["as published", "two blocks", "no block"])
def test_faster_decoding_s_checkpoints_are_converted(file: str, sizes: str, tmp_path: Path) -> None:
    head = medusa(**SIZES[sizes])
    source = write(tmp_path / "source", PUBLISHED, file, faster_decoding(head))
    notes = convert(str(source), tmp_path / "own")
    assert f"num_heads = {HEADS}: not in config.json, read off the tensors" in notes
    assert_tensors(load_drafter(str(tmp_path / "own")), head)
    found = inspect_checkpoint(str(tmp_path / "own"))
    assert found.config == head.config
    assert found.verifier == "lmsys/vicuna-7b-v1.3"


def test_of_a_whole_model_the_heads_are_converted(tmp_path: Path) -> None:
    head = medusa(bias=True)
    tensors = {f"medusa_head.{name}": t for name, t in faster_decoding(head).items()}
    tensors |= {"lm_head.weight": torch.randn(V, H), "model.norm.weight": torch.randn(H)}
    config = {"model_type": "llama", "vocab_size": V, "hidden_size": H, "num_hidden_layers": 32}
    config |= {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
    source = write(tmp_path / "source", config, "pytorch_model.bin", tensors)
    del config["num_hidden_layers"]
    with pytest.raises(ConfigError, match=r"convert .* reads all forms of such a checkpoint"):
        load_drafter(str(source))
    convert(str(source), tmp_path / "own")
    assert_tensors(load_drafter(str(tmp_path / "own")), head)


@pytest.mark.parametrize("sizes", ["as in the paper", "as published", "one output"])
def test_vllm_s_checkpoints_are_read_as_they_are_and_converted(sizes: str, tmp_path: Path) -> None:
    head = medusa(**SIZES[sizes])
    config = {**VLLM, "medusa_fc_bias": head.config.bias}
    config["original_lm_head"] = head.config.shared_output
    source = write(tmp_path / "source", config, "model.safetensors", head.state_dict())
    assert_tensors(load_drafter(str(source)), head)
    convert(str(source), tmp_path / "own")
    assert_tensors(load_drafter(str(tmp_path / "own")), head)


@pytest.mark.parametrize("whole", [False, True])
def test_vllm_s_token_map_becomes_the_draft_vocabulary(whole: bool, tmp_path: Path) -> None:
    """Its vocabulary-wide layers may have rows for all tokens."""
    head = medusa(draft_vocab_size=len(KEPT))
    tensors = {name: t.clone() for name, t in head.state_dict().items() if name != "d2t"}
    if whole:
        for name in tensors:
            if name.startswith("lm_heads"):
                tensors[name] = torch.randn(V, H).index_copy(0, KEPT, tensors[name])
    config = {**VLLM, "truncated_vocab_size": len(KEPT)}
    tensors |= {"token_map": KEPT}
    source = write(tmp_path / "source", config, "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"unknown token_map.*convert .* reads all forms"):
        load_drafter(str(source))
    convert(str(source), tmp_path / "own")
    assert_tensors(load_drafter(str(tmp_path / "own")), head)


def test_heads_without_an_output_layer_are_refused_with_the_remedy(tmp_path: Path) -> None:
    head = medusa(shared_output=True)
    config = {**PUBLISHED, "version": "2"}
    tensors = {n: t for n, t in head.state_dict().items() if n != "lm_head.weight"}
    source = write(tmp_path / "source", config, "medusa_lm_head.pt", tensors)
    with pytest.raises(ConfigError, match=r"Add it to the weights, as lm_head\.weight"):
        convert(str(source), tmp_path / "own")
    for name in ("lm_head.weight", "lm_heads.0.weight"):  # both of which vLLM 0.32 takes
        added = tensors | {name: head.state_dict()["lm_head.weight"]}
        torch.save(added, source / "medusa_lm_head.pt")
        convert(str(source), tmp_path / name)
        assert_tensors(load_drafter(str(tmp_path / name)), head)


MAPPED = {"truncated_vocab_size": 40}


@pytest.mark.parametrize(
    ("change", "token_map", "message"),
    [
        ({"num_heads": 2}, None, "num_heads is 2 in config.json, 3 by the tensors"),
        ({"logit_scale": 0.5}, None, "logit_scale is 0.5"),
        (MAPPED, torch.arange(40) + 21, "token_map has token 60, lm_heads.0.weight rows for 60"),
        (MAPPED, torch.arange(40) - 1, "token_map must be a list"),
        (MAPPED, torch.rand(40), "token_map must be a list"),
        (MAPPED, torch.zeros(40, dtype=torch.int64), "d2t names a token of the target twice"),
    ],
)
def test_what_contradicts_the_tensors_is_refused(
    change: dict[str, Any], token_map: Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = medusa().state_dict() | ({} if token_map is None else {"token_map": token_map})
    source = write(tmp_path / "source", VLLM | change, "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=message):
        convert(str(source), tmp_path / "own")
