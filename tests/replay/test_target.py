# SPDX-License-Identifier: Apache-2.0
"""The target's two ends, and what stands between them and its layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from redrafter_testing.models.families.chained import CHAINED
from redrafter_testing.models.families.family import Family, random_family
from redrafter_testing.models.families.vision import QWEN2_5_VL, QWEN3_VL
from redrafter_testing.models.quantised import FORMATS, quantise
from redrafter_testing.models.tiny_models import make_small_target
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.target import (
    TargetHead,
    final_norm,
    keeps_rows_apart,
    load_ends,
    load_target,
    read_target,
)
from vllm_redrafter.utils.errors import ConfigError

SCALED = {"logits_scaling": 3.0, "embedding_multiplier": 2.0}
SEEING = {"qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}
FAMILIES = {
    "llama": random_family("", "LlamaConfig"),
    "tied": random_family("", "LlamaConfig", sizes={"tie_word_embeddings": True}),
    # Their logits are not only those of the output layer; Gemma's embedding is not only a table.
    "gemma2": random_family("", "Gemma2Config"),
    "granite": random_family("", "GraniteConfig", sizes=SCALED),
    "cohere": random_family("", "CohereConfig"),
    # Other names for every part.
    "gpt_neox": random_family("", "GPTNeoXConfig", without=["head_dim"]),
    **SEEING,
}
NAMES = ("Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM")
RECURRENT = [family for family in CHAINED if family.architecture in NAMES]


def language_model(target: Any) -> Any:
    """The part that has layers and a final norm."""
    return getattr(target.base_model, "language_model", target.base_model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ends_are_those_of_the_whole_target(name: str, tmp_path: Path) -> None:
    folder, made = tmp_path / "shards", FAMILIES[name].make(tmp_path / "whole")
    load_target(Target.open(made)).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole, ends = load_target(Target.open(folder)), load_ends(Target.open(folder))
    assert not [n for n, _ in ends.named_parameters() if ".layers." in n]
    tokens = torch.randint(1, 20, (1, 12))
    kept: list[torch.Tensor] = []
    norm = language_model(whole).get_submodule("final_layer_norm" if name == "gpt_neox" else "norm")
    norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        outputs = whole(tokens, use_cache=False, output_hidden_states=True)
        states = final_norm(ends)(kept[0])
        assert torch.equal(states, outputs.hidden_states[-1])
        assert torch.equal(TargetHead(ends)(states), TargetHead(whole)(states))
        torch.testing.assert_close(TargetHead(ends)(states), outputs.logits)
        embedded = ends.get_input_embeddings()(tokens)
        assert torch.equal(embedded, whole.get_input_embeddings()(tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_i_is_what_goes_into_the_next_one(name: str, tmp_path: Path) -> None:
    whole = load_target(Target.open(FAMILIES[name].make(tmp_path)))
    tokens, hidden = torch.randint(1, 20, (2, 12)), FAMILIES[name].hidden_size
    entered: list[torch.Tensor] = []
    language_model(whole).layers[1].register_forward_pre_hook(
        lambda _, positional, named: entered.append((*positional, *named.values())[0]),
        with_kwargs=True,
    )
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), torch.arange(12).expand(2, -1))
    outputs = read_target(whole, batch, (1,))
    assert outputs.hidden.shape == (2, 12, 2 * hidden)
    assert torch.equal(outputs.hidden[..., hidden:], entered[0])
    assert torch.equal(outputs.last, read_target(whole, batch).hidden)


def assert_rows_do_not_see_each_other(folder: Path, keeps_apart: bool) -> None:
    """Two rows packed into the first block, one in the second."""
    whole = load_target(Target.open(folder))
    assert keeps_rows_apart(whole) == keeps_apart
    tokens = torch.randint(1, 20, (2, 14))
    positions = torch.tensor([[*range(7), *range(5), 0, 0], [*range(14)]])
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), positions)
    packed = read_target(whole, batch).last
    for row, part in ((0, slice(7)), (0, slice(7, 12)), (1, slice(14))):
        alone = whole.base_model(tokens[row : row + 1, part], use_cache=False).last_hidden_state
        torch.testing.assert_close(packed[row : row + 1, part], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", *SEEING])
def test_rows_of_text_that_are_packed_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    """Also where a row has several positions, of which transformers looks at the first."""
    assert_rows_do_not_see_each_other(FAMILIES[name].make(tmp_path), keeps_apart=True)


@pytest.mark.parametrize("family", RECURRENT, ids=lambda family: family.name)
def test_rows_do_not_see_each_other_where_a_state_goes_on(family: Family, tmp_path: Path) -> None:
    assert_rows_do_not_see_each_other(family.make(tmp_path), keeps_apart=False)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load it as a causal language model"):
        load_target(Target.open(tmp_path))


@pytest.mark.parametrize("form", [form for form in FORMATS if "tensors" not in form])
def test_a_quantised_target_transformers_cannot_run_is_refused(form: str, tmp_path: Path) -> None:
    folder = quantise(make_small_target(tmp_path), FORMATS[form])
    with pytest.raises(ConfigError, match=r"cannot run it here \(.+\): .* with --other-target"):
        load_target(Target.open(folder))
    with pytest.raises(ConfigError, match=r"is quantised, .* with --other-target"):
        load_ends(Target.open(folder))


@pytest.mark.parametrize("form", [form for form in FORMATS if "tensors" in form])
def test_a_quantised_target_that_transformers_unpacks_is_read(form: str, tmp_path: Path) -> None:
    plain = make_small_target(tmp_path / "plain")
    folder = quantise(make_small_target(tmp_path / "quantised"), FORMATS[form])
    tokens = torch.arange(24).view(2, 12)
    batch = TextBatch(tokens, torch.ones_like(tokens).bool(), torch.arange(12).expand(2, -1))
    targets = [load_target(Target.open(name)) for name in (folder, plain)]
    read, exact = (read_target(target, batch).last for target in targets)
    apart = (read - exact).norm() / exact.norm()
    # States that have nothing to do with each other are 1.4 apart.
    assert 1e-3 < apart < 0.7
