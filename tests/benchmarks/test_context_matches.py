"""benchmarks/context_matches.py as a user runs it, on short texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import context_matches
import numpy as np
import pytest
import torch
from context_matches_parts import kernel
from context_matches_parts.texts import KINDS, VOCAB_SIZE, Kind, texts

from vllm_redrafter.tree.context_matches import find_matches


@pytest.mark.parametrize(("kind", "length"), [("random", 0), ("one token", 5), ("periodic", 5)])
def test_texts_repeat_as_their_names_say(kind: Kind, length: int) -> None:
    made = texts(kind, requests=3, tokens=100)
    assert made.dtype == np.int32 and made.min() >= 0 and made.max() < VOCAB_SIZE
    assert not np.array_equal(made[0], made[1])
    found = find_matches(torch.from_numpy(made), torch.full((3,), 100), 1, 8, VOCAB_SIZE)
    assert found.lengths.tolist() == [[length]] * 3
    if length:
        following = texts(kind, requests=3, tokens=108)[:, 100:]
        assert np.array_equal(found.tokens[:, 0].numpy(), following)


def test_each_text_and_size_of_the_index_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    sizes = ["--tokens", "20", "1100", "--requests", "1", "3", "--repeats", "2"]
    context_matches.main([*sizes, "--output", str(output)])
    record = json.loads(output.read_text())
    found = [(cost["text"], cost["tokens"], cost["requests"]) for cost in record["index"]]
    expected = [(kind, tokens, r) for kind in KINDS for tokens in (20, 1100) for r in (1, 3)]
    assert found == expected
    for cost in record["index"]:
        assert cost["step"] > 0 and cost["prompt"] > 0
        # Text, hash table, and entries of suffixes with two places, for a power of two of tokens.
        room = 1024 if cost["tokens"] == 20 else 2048
        assert cost["bytes"] == 4 * (room + 8 * room + 5 * 3 * room)
    assert record["settings"] == {"context_matches": 2, "repeats": 2}
    assert "periodic" in capsys.readouterr().out


class Counted:
    """A stand-in for the stopwatch: each launch takes 20 microseconds, a copy 2 TB/s."""

    device = torch.device("cpu")
    free_bytes = 1 << 30

    def in_graph(self, launch: Callable[[], object]) -> float:
        launch()
        return 20.0

    def copy_bandwidth(self) -> float:
        return 2000.0


def search(text: Any, num_tokens: Any, entries: Any, vocab_size: int, out: Any) -> None:
    """The reference in the place of the kernels, which have tests of their own."""
    found = find_matches(text[entries], num_tokens[entries], *out.tokens.shape[1:], vocab_size)
    out.tokens.copy_(found.tokens)
    out.lengths.copy_(found.lengths)


SIZES = ["--tokens", "20", "50", "--requests", "3"]


def test_the_search_stands_beside_reading_the_texts_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel, "find_matches", search)
    found = context_matches.of_kernels(Counted(), context_matches.arguments(SIZES))
    assert found["copy_gb_per_s"] == 2000.0
    assert [(cost["text"], cost["tokens"], cost["requests"]) for cost in found["kernels"]] == [
        (kind, tokens, 3) for kind in KINDS for tokens in (20, 50)
    ]
    for cost in found["kernels"]:
        # 4 bytes a token, at 2 MB/µs.
        assert cost["floor"] == pytest.approx(3 * cost["tokens"] * 4 / 2e6)
        assert cost["time"] == 20.0
    assert "2000 GB/s" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "find_matches", lambda *_: None)
    with pytest.raises(SystemExit, match=r"matches of 3 texts \(one token, 20 tokens\) are not"):
        context_matches.of_kernels(Counted(), context_matches.arguments(SIZES))


def test_without_a_gpu_it_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        context_matches.arguments(["--device", "cuda"])
    assert "no GPU" in capsys.readouterr().err
