# SPDX-License-Identifier: Apache-2.0
"""benchmarks/mlx_throughput.py: a small pair beside mlx-lm, to the table and the file."""

import json
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

import mlx_throughput


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_every_method_answers_every_prompt_and_answers_are_identical(
    reciting_pair: tuple[Path, Path],
    tmp_path: Path,
    temperature: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "mlx.json"
    rows = [{"category": t, "turns": [text]} for t in ("code", "math") for text in ("a", "b", "c")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ["--dataset", str(tmp_path / "rows.jsonl"), "--num-prompts", "2", "--max-tokens", "12"]
    options = ["--shape", "4x4:7", "--temperature", temperature, "--output", str(output)]
    mlx_throughput.main([*map(str, reciting_pair), *asked, *options])
    assert "tokens per step" in capsys.readouterr().out
    record = json.loads(output.read_text())
    rows = {(row["task"], row["method"]): row for row in record["rows"]}
    methods = ("mlx-lm", "adaptive", "4x4:7")
    assert [*rows] == [(task, method) for task in ("code", "math") for method in methods]
    for (_, method), row in rows.items():
        assert (row["tokens"], row["answers"]) == (24, 2) and row["seconds"] > 0
        # mlx-lm draws in another way.
        assert row["identical"] == 2 or (method == "mlx-lm" and temperature != "0")
    assert rows["code", "mlx-lm"]["steps"] == 24 > rows["code", "4x4:7"]["steps"]
