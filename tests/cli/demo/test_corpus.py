"""The demo's text and how it is cut: prompts for the target, windows to train it on."""

from __future__ import annotations

import torch

from vllm_redrafter.cli.demo.corpus import excerpts, standard_library_sources
from vllm_redrafter.cli.demo.target import TargetSettings, windows


def test_excerpts_are_three_lines_in_a_repeatable_random_order() -> None:
    sources = standard_library_sources(["textwrap", "shlex"])
    found = excerpts(sources)
    assert len(found) > 300
    assert found == excerpts(sources)
    assert found != excerpts(sources, seed=1)
    assert sorted(found) == sorted(excerpts(sources, seed=1))
    for excerpt in found:
        assert excerpt.count("\n") == 3
        assert excerpt.split("\n")[2].strip()
        assert any(excerpt in source + "\n" for source in sources)


def test_windows_are_cut_from_the_text_repeatably() -> None:
    settings = TargetSettings(batch_size=3, block_size=7)
    stream = torch.arange(100)
    first, second = windows(stream, settings), windows(stream, settings)
    for _ in range(5):
        batch = next(first)
        assert batch.shape == (3, 7)
        assert torch.equal(batch, next(second))
        assert torch.equal(batch - batch[:, :1], torch.arange(7).expand(3, -1))
