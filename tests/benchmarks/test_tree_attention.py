"""benchmarks/tree_attention.py: its arguments, and what it does without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import tree_attention

from redrafter_testing.benchmarks.own_process import in_own_process


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "0"], "'0': expected an integer of at least 1"),
        (["--contexts", "4k"], "'4k': expected an integer of at least 1"),
        (["--nodes", "1"], "'1': a tree has 2 to 128 nodes"),
        (["--nodes", "129"], "'129': a tree has 2 to 128 nodes"),
        (["--nodes", "8x"], "'8x': expected a number of nodes or WxL beams"),
        (["--nodes", "51x5"], "'51x5': 1 to 50 beams of 1 to 127 tokens"),
        (["--nodes", "8x0"], "'8x0': 1 to 50 beams of 1 to 127 tokens"),
        (["--output", "missing/results.json"], "its folder does not exist"),
        (["--output", "."], "is a folder"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(SystemExit) as stopped:
        tree_attention.main(arguments)

    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpu_does_not_time_the_interpreter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    with pytest.raises(SystemExit):
        tree_attention.main([])

    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_without_a_gpu_kernels_are_checked_and_nothing_is_timed(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = in_own_process(tree_attention.__file__, "--output", str(output))

    assert done.returncode == 0, done.stderr
    assert "No GPU: nothing is timed." in done.stdout
    assert "DIFFERS" not in done.stdout
    assert not any(unit in done.stdout for unit in ("µs", "GB/s", "floor"))
    written = json.loads(output.read_text())
    assert written["attention"] == [] and written["copy_gbps"] is None
    checks = written["checks"]
    assert all(check["error"] <= check["tolerance"] for check in checks)
    assert {check["kernel"] for check in checks} == {
        *("tree", "tree, 3 parts", "one node", "beams apart"),
    }
