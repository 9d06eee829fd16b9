"""benchmarks/context_matches.py as a user runs it, on short texts."""

from __future__ import annotations

import json
from pathlib import Path

import context_matches
import numpy as np
import pytest
import torch
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
