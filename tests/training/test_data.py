"""Blocks of tokens: what counts, batches, files."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from vllm_redrafter.config import ConfigError
from vllm_redrafter.training.data import TokenBlocks
from vllm_redrafter.training.target import load_target


def numbered(num: int) -> TokenBlocks:
    tokens = torch.arange(num).unsqueeze(1).expand(-1, 3)
    return TokenBlocks(tokens, torch.ones_like(tokens, dtype=torch.bool))


def test_prompts_and_padding_are_not_generated() -> None:
    blocks = TokenBlocks.from_answers([[5, 6], [7]], [[8], [9, 3, 4]])
    assert blocks.tokens.tolist() == [[5, 6, 8, 0], [7, 9, 3, 4]]
    assert blocks.generated.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]


def test_batches_keep_the_order_and_the_rest() -> None:
    batches = list(numbered(7).batches(3))
    assert [b.tokens[:, 0].tolist() for b in batches] == [[0, 1, 2], [3, 4, 5], [6]]


def test_shuffled_batches_pass_over_all_blocks_in_whole_batches() -> None:
    batches = numbered(7).shuffled_batches(3, torch.Generator().manual_seed(0))
    first, second, third, fourth = (b.tokens[:, 0].tolist() for b in islice(batches, 4))
    for one, other in ((first, second), (third, fourth)):
        assert len(one) == len(other) == 3
        assert not set(one) & set(other)
    assert first + second != third + fourth


def test_fewer_blocks_than_a_batch_are_one_batch() -> None:
    batches = numbered(2).shuffled_batches(5, torch.Generator().manual_seed(0))
    assert [sorted(b.tokens[:, 0].tolist()) for b in islice(batches, 2)] == [[0, 1], [0, 1]]


def test_batches_are_sorted_by_length_and_trimmed() -> None:
    lengths = [2, 9, 3, 8, 2, 9, 3, 8]
    blocks = TokenBlocks.from_answers([[5]] * 8, [[6] * (n - 1) for n in lengths])
    assert blocks.lengths.tolist() == lengths
    batches = list(islice(blocks.shuffled_batches(2, torch.Generator().manual_seed(0)), 4))
    assert sorted(b.tokens.shape[1] for b in batches) == [2, 3, 8, 9]
    assert all(b.generated[:, 1:].all() for b in batches)


def test_blocks_survive_a_file(tmp_path: Path) -> None:
    blocks = TokenBlocks.from_answers([[5, 6], [7]], [[8], [9, 3, 4]])
    blocks.save(tmp_path / "blocks.safetensors")
    loaded = TokenBlocks.load(tmp_path / "blocks.safetensors")
    assert torch.equal(loaded.tokens, blocks.tokens) and loaded.tokens.dtype == torch.int64
    assert torch.equal(loaded.generated, blocks.generated)


def test_bad_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must both be \[N, T\], got \[2, 3\] and \[2, 4\]"):
        TokenBlocks(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ConfigError, match="nothing here"):
        TokenBlocks.load(tmp_path / "nothing here")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ConfigError, match="not a file of token blocks"):
        TokenBlocks.load(tmp_path / "text")
    with pytest.raises(ConfigError, match="there are none"):
        next(numbered(0).shuffled_batches(2, torch.Generator()))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load it as a causal language model"):
        load_target(tmp_path)
