# SPDX-License-Identifier: Apache-2.0
"""Published speculators are served by their names alone; what is not read is refused at once."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from redrafter_testing.models.checkpoints import edit_config, edit_tensors
from redrafter_testing.models.published_speculators import KINDS, D, H, V, make_lstm, make_mlp
from redrafter_testing.own_commands import printed_by, refusal_of
from vllm_redrafter.checkpoints.conversion import convert
from vllm_redrafter.checkpoints.reading import Checkpoint, load_drafter
from vllm_redrafter.checkpoints.weight_files import find_weights, read_weights
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.dataset import DatasetInfo, write_shard
from vllm_redrafter.data.rows import Row
from vllm_redrafter.engine.speculative_config import Request, request_of, validated
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_network")
FLAGS = ("revision", "spec_method", "spec_model", "spec_tokens", "speculative_config", "tokenizer")


def asked(model: object, **flags: Any) -> Request | None:
    return request_of(SimpleNamespace(**dict.fromkeys(FLAGS) | {"model": str(model)} | flags))


def settled(folder: Path, **given: Any) -> tuple[ReDrafterConfig, Checkpoint | None]:
    request = asked("target", speculative_config={"model": str(folder), **given})
    assert request is not None
    return validated(request)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_served_as_a_tree_of_its_levels(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "published")
    levels = json.loads((folder / "config.json").read_text())["n_predict"]
    if (folder / "pytorch_model.bin").is_file():
        with pytest.raises(ConfigError, match=rf"`vllm-redrafter convert {folder} FOLDER`"):
            settled(folder)
        convert(str(folder), tmp_path / "own")
        folder = tmp_path / "own"
    config, checkpoint = settled(folder)
    shape = config.num_speculative_tokens, config.beam_width, config.beam_length
    assert shape == (12, 4, levels) and checkpoint is not None
    head = checkpoint.head
    assert (head.hidden_size, head.vocab_size) == (H, V)
    assert head.model_type == ("redrafter_lstm" if "lstm" in kind else "redrafter_mlp")
    assert settled(folder, num_speculative_tokens=5)[0].num_speculative_tokens == 5


def test_a_speculator_named_alone_brings_its_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_lstm(tmp_path / "it", safe=True, all_names=False, base_model_name_or_path=str(tmp_path))
    request = asked(tmp_path / "it")
    assert request is not None and request.of_target["model"] == str(tmp_path)


@pytest.mark.parametrize("method", ["mlp_speculator", "arctic"])
def test_one_that_another_program_shall_serve_is_left_alone(method: str, tmp_path: Path) -> None:
    folder = make_mlp(tmp_path)
    assert asked("target", spec_model=str(folder), spec_method=method) is None
    assert asked("target", speculative_config={"model": str(folder), "method": method}) is None


def test_a_tensor_with_many_names_is_read_and_written_once(tmp_path: Path) -> None:
    make_lstm(tmp_path / "published")
    read = read_weights(find_weights(str(tmp_path / "published")))
    assert len({read[f"head.{d}.weight"].data_ptr() for d in range(3)}) == 1
    convert(str(tmp_path / "published"), tmp_path / "own")
    own = load_file(tmp_path / "own/model.safetensors")
    assert sum(tensor.numel() for tensor in own.values()) == 2 * V * D + 4 * D * (H + D) + 4 * D


@pytest.mark.parametrize(
    ("make", "entries", "tensors", "message"),
    [
        (make_mlp, {"method": "mtp"}, {}, "'mtp' .* are sum_rnn and sum_lstm: take one of"),
        (make_mlp, {"method": ["sum_rnn"]}, {}, "sum_rnn.* are sum_rnn and sum_lstm: take one of"),
        (make_mlp, {"inner_dim": "²"}, {}, "inner_dim '²' .* must be one number"),
        (make_lstm, {"tie_lstm_embs": False}, {}, "tie_lstm_embs must be true .* take such"),
        (make_lstm, {"inner_dim": "32.32"}, {}, "inner_dim '32.32' .* of several layers"),
        (make_lstm, {"proj_dim": "16"}, {}, "proj_dim 16 .* must be inner_dim, 32: take"),
        (make_mlp, {"n_predict": 128}, {}, "num_levels must be at most 127, got 128"),
        (make_mlp, {"tie_weights": 1}, {}, "tied must be true or false, got 1"),
        (make_mlp, {"tie_weights": True}, {}, r"emb\.0.*emb\.1.* differ: take the checkpoint"),
        (make_mlp, {}, {"head.0.weight": torch.zeros(1)}, r"head\.0.* differ: take"),
        (make_lstm, {}, {"cell_ln.0.bias": torch.zeros(D).char()}, r"cell_ln\.bias is int8: take"),
        (make_mlp, {"vocab_size": 300}, {}, r"head\.0\.weight has shape \[211, 32\]"),
        (make_lstm, {}, {"cell_proj.0.weight": torch.zeros(1)}, "cell_proj.0.* differ: take"),
    ],
)
def test_what_is_not_read_is_refused_with_the_remedy(
    make: Any, entries: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path, safe=True)
    edit_config(tmp_path, lambda values: values.update(entries))
    edit_tensors(tmp_path, lambda stored: stored.update(tensors))
    with pytest.raises(ConfigError, match=message):
        settled(tmp_path)


def test_a_speculator_with_weights_by_depth_drafts_as_many_levels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beam_length 5 exceeds the 4 tokens .* 4 or less"):
        settled(make_mlp(tmp_path / "untied"), beam_length=5)
    assert settled(make_mlp(tmp_path / "tied", tied=True), beam_length=5)[0].beam_length == 5


@pytest.mark.parametrize("make", [make_mlp, make_lstm])
def test_a_draft_vocabulary_is_what_a_target_wrote_most(make: Any, tmp_path: Path) -> None:
    """Tables of embeddings stay whole: rows are read by the target's ids."""
    make(tmp_path / "it", safe=True, all_names=False)
    for name, vocabulary in (("data", V), ("other", V + 1)):
        (tmp_path / name).mkdir()
        DatasetInfo("target", "a", "b", None, "c", 1, 1, vocabulary).save(tmp_path / name)
        row = Row(0, [8, 8, 8, 9, 9, 5, 9, 5, 4], [False] * 3 + [True] * 6)
        write_shard(tmp_path / name, 0, [row])
    asked = ["convert", str(tmp_path / "it"), str(tmp_path / "cut"), "--draft-vocab-size", "2"]
    assert "the data is of 212: give" in refusal_of(*asked, "--data", tmp_path / "other")
    printed = printed_by(*asked, "--data", tmp_path / "data")
    assert "ranks 83.33% of what the target wrote" in printed
    whole, cut = load_drafter(str(tmp_path / "it")), load_drafter(str(tmp_path / "cut"))
    hidden, logits = torch.randn(1, H), []
    for head in (whole, cut):
        condition = head.condition(hidden)
        root = head.embedding_of(torch.nn.Identity(), 0)(torch.tensor([100]))
        logits.append(head.logits(condition, head.start(condition, root), 0))
    torch.testing.assert_close(logits[1], logits[0][:, [5, 9]])
    assert cut.target_tokens(torch.arange(2)).tolist() == [5, 9]
