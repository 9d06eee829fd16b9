# SPDX-License-Identifier: Apache-2.0
"""benchmarks/context_matches.py as a user without a GPU runs it, on short texts."""

import json
from pathlib import Path

import context_matches
import pytest
import torch
from context_matches import KINDS, VOCAB_SIZE, texts

from vllm_redrafter.tree.context_matches import find_matches


@pytest.mark.parametrize(("kind", "length"), [("random", 0), ("one token", 5), ("periodic", 5)])
def test_texts_repeat_as_their_names_say(kind: str, length: int) -> None:
    made = torch.from_numpy(texts(kind, requests=3, tokens=100))
    assert not made[0].equal(made[1])
    found = find_matches(made, torch.full((3,), 100), 1, 8, VOCAB_SIZE)
    assert found.lengths.tolist() == [[length]] * 3


def test_each_text_and_size_of_the_index_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    sizes = ["--tokens", "20", "1100", "--requests", "1", "3", "--repeats", "2"]
    context_matches.main([*sizes, "--output", str(output)])
    costs = json.loads(output.read_text())["index"]
    found = [(cost["text"], cost["tokens"], cost["requests"]) for cost in costs]
    assert found == [(kind, tokens, r) for kind in KINDS for tokens in (20, 1100) for r in (1, 3)]
    assert all(cost["step"] > 0 and cost["prompt"] > 0 and cost["bytes"] > 0 for cost in costs)
    assert "periodic" in capsys.readouterr().out
