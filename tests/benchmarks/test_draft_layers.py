"""A draft's layers timed, by stand-ins for the stopwatch and for the kernels, tested elsewhere."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_layers
import pytest
import torch
from shared_parts.results import wide_console


class Counted:
    """Each launch takes a microsecond more than the last one."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.launches = 0

    def in_graph(self, launch: Callable[[], object]) -> float:
        launch()
        self.launches += 1
        return float(self.launches)

    def copy_bandwidth(self) -> float:
        return 2000.0


def options(output: Path) -> argparse.Namespace:
    return argparse.Namespace(hidden=[32], rows=[4, 8], output=output)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' references in the place of the kernels."""

    def cell(embedded: Any, state: Any, weight: Any, bias: Any, out: Any, *others: Any) -> None:
        rows = len(out)
        out.copy_(draft_layers.naive_gated_cell(embedded, state, rows, weight, bias, others[0]))

    def layer(product: Any, out: Any, **options: Any) -> None:
        out.copy_(draft_layers.naive_draft_layer(product, len(out), **options))

    for name in ("choose_candidates", "gather_dot", "rank_candidates"):
        monkeypatch.setattr(draft_layers, name, getattr(draft_layers, f"naive_{name}"))
    monkeypatch.setattr(draft_layers, "VOCABULARY", 200)
    monkeypatch.setattr(draft_layers, "gated_cell", cell)
    monkeypatch.setattr(draft_layers, "draft_layer", layer)


@pytest.mark.usefixtures("in_torch")
def test_each_layer_stands_beside_a_product_of_as_many_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "layers.json"
    draft_layers.run(Counted(), options(output), {}, wide_console())
    report = json.loads(output.read_text())
    assert report["copy_tb_per_s"] == 2.0
    found = [(layer["name"], layer["rows"], layer["weight_bytes"]) for layer in report["layers"]]
    square = 2 * 32 * 32

    def kinds(rows: int) -> dict[str, int]:
        requests = rows // 4
        return {
            "candidates": 2 * 5 * requests * 200,
            "gathered": 2 * requests * 128 * 32,
            "ranked": 8 * rows * 128,  # the reference has float64
        }

    of_gated = [("cell", 4), ("its product", 4), ("block", 1), ("its product", 1)]
    expected = [
        layer
        for rows in (4, 8)
        for layer in (
            *((name, rows, n * square) for name, n in of_gated),
            *((name, rows, read) for name, read in kinds(rows).items()),
        )
    ]
    assert found == expected
    assert "its product" in capsys.readouterr().out


@pytest.mark.usefixtures("in_torch")
def test_what_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_layers, "gated_cell", lambda *_: None)
    with pytest.raises(SystemExit, match=r"the cell of \[4, 32\] is off by"):
        draft_layers.run(Counted(), options(tmp_path / "none"), {}, wide_console())


def test_without_a_gpu_it_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        draft_layers.main([])
    assert "no GPU" in capsys.readouterr().err
