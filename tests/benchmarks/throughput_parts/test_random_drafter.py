"""A drafter of random weights that an engine takes for the one it stands in for."""

from __future__ import annotations

from pathlib import Path

import torch
from throughput_parts.random_drafter import write_random_drafter

from vllm_redrafter import load_drafter, save_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead


def test_it_has_the_sizes_and_the_draft_vocabulary_and_nothing_learned(tmp_path: Path) -> None:
    trained = RecurrentHead(RecurrentConfig(11, 8, exit_dim=6, draft_vocab_size=5))
    trained.keep_tokens(torch.tensor([0, 2, 3, 7, 10]))
    save_drafter(trained, tmp_path / "trained")

    state = torch.random.get_rng_state()
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_drafter(str(tmp_path / "trained"), tmp_path / folder, seed)
    assert torch.equal(torch.random.get_rng_state(), state)

    found = {name: load_drafter(str(tmp_path / name)) for name in ("a", "b", "c")}
    assert found["a"].config == trained.config
    assert torch.equal(found["a"].d2t, trained.d2t)
    for name, tensor in found["a"].named_parameters():
        assert torch.equal(tensor, found["b"].get_parameter(name))
        assert not torch.equal(tensor, trained.get_parameter(name))
        assert not torch.equal(tensor, found["c"].get_parameter(name))
