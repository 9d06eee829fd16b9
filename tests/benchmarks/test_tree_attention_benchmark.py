"""benchmarks/tree_attention.py without a GPU: all of it but the stopwatch.

No test imports the kernels in this process: Triton's interpreter, once chosen, is chosen for all.
What needs them runs in two processes of their own: the benchmark as a user without a GPU runs it,
and (this file as a script) a whole measurement whose stopwatch is not a GPU's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as Python does for a script

import tree_attention
from tree_attention_cases import HEADS, Case, Heads, TreeShape, leaf_paths
from tree_attention_problem import Inputs, contiguous, make_problem, tree_mask
from tree_attention_report import (
    STEP,
    AttentionResult,
    Cell,
    Check,
    Missing,
    StepResult,
    Timing,
    Verdict,
    judge,
)
from tree_attention_tables import (
    Footnotes,
    attention_table,
    check_table,
    step_table,
    tune_table,
    verdict_table,
)

TINY = Heads("tiny", query=4, kv=2, dim=64)
CPU = torch.device("cpu")


def tiny(nodes: str, batch: int = 2, context: int = 20) -> Case:
    return Case(TINY, batch, context, TreeShape.parse(nodes), dtype=torch.float16)


# Arguments


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
        (["--shapes", "gpt-2"], "invalid choice: 'gpt-2'"),
        (["--parts", "129"], "'129': expected an integer from 1 to 128"),
        (["--memory", "1.5"], "'1.5': expected a fraction"),
        (["--output", "missing/results.json"], "its folder does not exist"),
        (["--output", "."], "is a folder"),
        (["--tune"], "there is no GPU"),
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


def test_quick_leaves_what_is_asked_for() -> None:
    full, quick = (tree_attention.read_arguments(argv) for argv in ([], ["--quick"]))
    asked = tree_attention.read_arguments(["--quick", "--batches", "1", "2"])

    assert (full.batches, full.contexts, full.repeats) == ([1, 8, 64], [512, 4096, 32768], 50)
    assert (quick.batches, quick.contexts, quick.nodes) == ([8], [4096], ["32", "8x5"])
    assert (asked.batches, asked.contexts) == ([1, 2], [4096])


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_interpreter_is_left_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_INTERPRET", before)

    with tree_attention.interpreter():
        assert os.environ["TRITON_INTERPRET"] == "1"

    assert os.environ.get("TRITON_INTERPRET") == before


def test_the_interpreter_cannot_come_after_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", torch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    with (
        pytest.raises(RuntimeError, match="imported before its interpreter"),
        tree_attention.interpreter(),
    ):
        pass


# Trees


@pytest.mark.parametrize("nodes", ["2", "4", "32", "64", "128"])
def test_a_number_of_nodes_is_reached_by_every_tree(nodes: str) -> None:
    tree = tiny(nodes, batch=8).tree

    assert tree.num_nodes.tolist() == [int(nodes)] * 8
    assert tree.parents.shape[1] == int(nodes)


def test_trees_branch_and_differ_between_requests() -> None:
    case = tiny("32", batch=8)

    assert case.tree.depths.amax(dim=1).min() >= 3
    assert min(len(paths) for paths in case.paths) >= 5
    assert len({tuple(parents) for parents in case.tree.parents.tolist()}) > 1


def test_beams_are_as_many_and_as_long_as_asked_for() -> None:
    case = tiny("8x5", batch=16)

    assert [len(path) for paths in case.paths for path in paths] == [6] * 8 * 16
    # Dedup saves something, or there would be nothing to measure.
    assert case.tree.num_nodes.max() < 8 * 5 + 1


def test_leaf_paths_climb_to_the_root() -> None:
    case = tiny("16")

    for parents, paths in zip(case.tree.parents.tolist(), leaf_paths(case.tree), strict=True):
        assert {node for path in paths for node in path} == set(range(16))
        for path in paths:
            assert path[0] == 0
            assert [parents[node] for node in path[1:]] == path[:-1]
            assert path[-1] not in parents[1:]


# Bytes


def test_the_floor_counts_every_byte_once() -> None:
    keys = 2 * (20 + 4) * 2 * 2 * 64 * 2  # requests, positions, K and V, KV heads, dim, fp16
    query_and_output = 2 * (2 * 4) * 4 * 64 * 2
    block_table = 2 * 2 * 4  # two blocks of 16 for 24 positions
    bit_sets = 2 * 4 * 4  # a word per node

    assert tiny("4").floor_bytes == keys + query_and_output + block_table + bit_sets


def test_the_floor_of_llama_3() -> None:
    case = Case(HEADS["llama-3-8b"], 8, 4096, TreeShape.parse("64"))
    nodes = 8 * 64

    assert case.floor_bytes == (
        (8 * 4096 + nodes) * 4096  # 2 x 8 KV heads x 128 x 2 bytes
        + nodes * 2 * 8192  # 32 heads x 128 x 2 bytes, read and written
        + 8 * 260 * 4
        + nodes * 2 * 4
    )


def test_memory_is_that_of_the_tensors() -> None:
    case = tiny("3x2")
    problem = make_problem(case, CPU)
    _, keys, values = contiguous(problem.tree, case.tree)

    assert case.cache_bytes == problem.tree.key_cache.nbytes + problem.tree.value_cache.nbytes
    assert case.contiguous_bytes == keys.nbytes + values.nbytes


# The three problems


def keys_of(inputs: Inputs, request: int, count: int) -> torch.Tensor:
    """A request's first keys and values, read through its block table."""
    size = inputs.key_cache.shape[1]
    position = torch.arange(count)
    block = inputs.block_table[request][position // size].long()
    return torch.stack(
        [cache[block, position % size] for cache in (inputs.key_cache, inputs.value_cache)]
    )


@pytest.mark.parametrize("context", [1, 20, 31, 32])
@pytest.mark.parametrize("nodes", ["8", "3x2"])
def test_beams_apart_hold_the_context_and_their_path(nodes: str, context: int) -> None:
    case = tiny(nodes, context=context)
    problem = make_problem(case, CPU)
    starts = problem.beams.query_start_loc.tolist()
    tree_starts = problem.tree.query_start_loc.tolist()

    beam = 0
    for request, paths in enumerate(case.paths):
        whole = keys_of(problem.tree, request, context + case.shape.nodes)
        for path in paths:
            expected = whole[:, [*range(context), *(context + node for node in path)]]
            assert torch.equal(keys_of(problem.beams, beam, expected.shape[1]), expected)
            rows = [tree_starts[request] + node for node in path]
            assert problem.beam_rows[starts[beam] : starts[beam + 1]].tolist() == rows
            beam += 1
    assert beam == len(starts) - 1
    assert torch.equal(problem.beams.query, problem.tree.query[problem.beam_rows])
    chain = problem.beams.ancestors[0, :, 0].tolist()
    assert chain == [2 ** (depth + 1) - 1 for depth in range(problem.beams.max_nodes)]


def test_beams_apart_share_the_context_but_no_block_that_they_write() -> None:
    case = tiny("3x2", context=40)
    problem = make_problem(case, CPU)
    full = 40 // 16
    tables = problem.beams.block_table
    shared = problem.tree.block_table

    for beam, request in enumerate([0] * 3 + [1] * 3):
        assert torch.equal(tables[beam, :full], shared[request, :full])
    own = tables[:, full:].flatten().tolist()
    assert len({*own, *shared.flatten().tolist()}) == len(own) + shared.numel()


def test_one_node_is_the_root_with_the_same_context() -> None:
    problem = make_problem(tiny("8"), CPU)

    assert problem.plain.query_start_loc.tolist() == [0, 1, 2]
    assert torch.equal(problem.plain.query, problem.tree.query[[0, 8]])
    assert problem.plain.ancestors[:, 0, 0].tolist() == [1, 1]
    assert problem.plain.key_cache is problem.tree.key_cache
    assert torch.equal(problem.plain.block_table, problem.tree.block_table)


def test_contiguous_keys_are_the_pages_in_order() -> None:
    case = tiny("3x2")
    problem = make_problem(case, CPU)
    query, keys, values = contiguous(problem.tree, case.tree)

    for request, count in enumerate(case.tree.num_nodes.tolist()):
        pages = keys_of(problem.tree, request, 20 + case.shape.nodes)
        assert torch.equal(torch.stack([keys[request], values[request]]), pages.transpose(1, 2))
        start = problem.tree.query_start_loc[request]
        own = problem.tree.query[start : start + count]
        assert torch.equal(query[request, :, :count], own.transpose(0, 1))


def climb(parents: list[int], node: int) -> set[int]:
    return {node} | (climb(parents, parents[node]) if node else set())


def evaluate_mask(case: Case, ancestor_mask: torch.Tensor) -> torch.Tensor:
    """[R, nodes, keys] bool."""
    nodes = case.shape.nodes
    return tree_mask(case.context, ancestor_mask)(
        torch.arange(case.batch).view(-1, 1, 1),
        torch.tensor(0),
        torch.arange(nodes).view(-1, 1),
        torch.arange(case.context + nodes),
    )


@pytest.mark.parametrize("nodes", ["16", "3x2", "40"])
def test_flex_sees_the_context_and_the_ancestors(nodes: str) -> None:
    case = tiny(nodes)
    mask = evaluate_mask(case, case.tree.ancestor_mask)

    for request, count in enumerate(case.tree.num_nodes.tolist()):
        parents = case.tree.parents[request].tolist()
        for node in range(count):
            expected = {*range(20), *(20 + seen for seen in climb(parents, node))}
            assert set(mask[request, node].nonzero().flatten().tolist()) == expected


def test_flex_mask_is_not_any_tree_s() -> None:
    case = tiny("16")
    other = replace(case, seed=1)

    assert not torch.equal(
        evaluate_mask(case, case.tree.ancestor_mask), evaluate_mask(case, other.tree.ancestor_mask)
    )


# Figures, targets, tables, from known times

COPY = 4000.0
KEPT = AttentionResult(
    heads="llama-3-8b",
    batch=8,
    context=4096,
    nodes="32",
    rows=256,
    leaves=130,
    floor_bytes=360_000_000,
    tree=Timing([100.0, 90.0, 300.0]),
    launched=Timing([150.0]),
    one_node=Timing([95.0]),
    flex=Timing([200.0]),
    beams=Timing([450.0]),
)
STEPS_KEPT = StepResult(STEP, "llama-7b", 8, "8x5", 32, 4_000_000, Timing([15.0]), Timing([80.0]))


def status(
    attention: list[AttentionResult], steps: list[StepResult] | None = None
) -> dict[str, Verdict]:
    """Verdicts by the target's first word that tells them apart."""
    verdicts = judge(attention, steps or [], COPY)
    return dict(zip(("bandwidth", "nodes", "beams", "step"), verdicts, strict=True))


def test_bandwidth_is_the_floor_s_bytes_over_the_median() -> None:
    assert KEPT.gbps == pytest.approx(3600)
    assert status([KEPT])["bandwidth"].worst == "90% (llama-3-8b, batch 8, context 4096, nodes 32)"


def test_targets_met() -> None:
    found = status([KEPT, replace(KEPT, nodes="8x5")], [STEPS_KEPT])

    assert {name: verdict.status for name, verdict in found.items()} == dict.fromkeys(found, "met")
    assert found["nodes"].worst == "1.05 × (llama-3-8b, batch 8, context 4096, nodes 32)"
    assert found["beams"].worst == "4.50 × (llama-3-8b, batch 8, context 4096, nodes 8x5)"
    assert found["step"].worst == "15.0 µs (llama-7b, batch 8, nodes 8x5)"
    assert (found["bandwidth"].measured, found["nodes"].measured) == (2, 1)


@pytest.mark.parametrize(
    ("name", "worse"),
    [
        ("bandwidth", replace(KEPT, floor_bytes=319_000_000)),
        ("nodes", replace(KEPT, one_node=Timing([90.0]))),
        ("beams", replace(KEPT, nodes="8x5", beams=Timing([299.0]))),
    ],
)
def test_the_worst_case_decides(name: str, worse: AttentionResult) -> None:
    assert status([KEPT, replace(KEPT, nodes="8x5"), worse])[name].status == "missed"


@pytest.mark.parametrize("outside", [replace(KEPT, batch=4), replace(KEPT, context=2048)])
def test_cases_out_of_range_are_shown_but_do_not_decide(outside: AttentionResult) -> None:
    found = status([KEPT, replace(outside, tree=Timing([1000.0]))])

    assert found["bandwidth"].status == found["nodes"].status == "met"
    assert str(found["bandwidth"].elsewhere).startswith("9% (")
    assert str(found["nodes"].elsewhere).startswith("10.53 × (")


def test_a_failed_case_is_a_miss_and_no_case_is_neither() -> None:
    failed = replace(KEPT, batch=64, tree=Missing("failed: OutOfResources: shared memory"))
    found = status([KEPT, failed], [replace(STEPS_KEPT, batch=64)])

    assert (found["bandwidth"].status, found["bandwidth"].failed) == ("missed", 1)
    assert found["beams"].status == found["step"].status == "not measured"


def text(*tables: Table) -> str:
    console = Console(width=200, file=StringIO(), color_system=None)
    for table in tables:
        console.print(table)
    written = console.file
    assert isinstance(written, StringIO)
    return written.getvalue()


def test_tables_show_every_figure() -> None:
    notes = Footnotes()
    shown = text(
        attention_table([KEPT], COPY, notes),
        step_table([STEPS_KEPT], COPY, notes),
        verdict_table(judge([KEPT], [STEPS_KEPT], COPY), "NVIDIA H200"),
        check_table([Check("tree", "a case", 1e-6, 1e-5), Check("tree", "another", 1e-4, 1e-5)]),
    )

    (line,) = [row for row in shown.splitlines() if "llama-3-8b  " in row]
    figures = ["8", "4096", "32", "90.0", "100.0", "150.0", "3600", "90%", "1.05", "2.00", "4.50"]
    assert line.split() == ["llama-3-8b", *figures]
    (line,) = [row for row in shown.splitlines() if "accept_path + compact_kv  " in row]
    assert line.split()[3:] == ["llama-7b", "8", "8x5", "32", "1.0", "15.0", "80.0"]
    assert "1.0e-06" in shown and "agrees" in shown and "DIFFERS" in shown
    assert notes.lines() == []
    assert "another GPU" not in shown
    assert "This is another GPU (A100)." in " ".join(text(verdict_table([], "A100")).split())


def test_what_failed_has_its_cell_and_its_reason() -> None:
    notes = Footnotes()
    failed = Missing("failed: LoweringException: no valid triton configs")
    rows = [
        replace(KEPT, flex=failed),
        replace(KEPT, nodes="64", flex=failed, beams=Missing("skipped: 9 GB")),
        replace(KEPT, nodes="4", tree=Missing("failed: InterpreterError: x")),
    ]
    shown = text(attention_table(rows, COPY, notes))

    first, second, third = (row for row in shown.splitlines() if "llama-3-8b  " in row)
    assert first.split()[-3:] == ["failed", "(1)", "4.50"]
    assert second.split()[-4:] == ["failed", "(1)", "skipped", "(2)"]
    assert third.count("failed (3)") == 4
    assert notes.lines()[:2] == [f"(1) {failed.reason}", "(2) skipped: 9 GB"]


def test_the_best_number_of_parts_is_marked() -> None:
    cells: dict[str, Cell] = {
        "auto": Timing([12.0]),
        "1": Timing([20.0]),
        "2": Timing([11.0]),
        "4": Missing("no"),
    }
    shown = text(tune_table([("a case", cells)], Footnotes()))

    assert "12.0   20.0   11.0*   no (1)" in shown


# In processes of their own


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Without GPUs, whatever the machine has."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_a_gpu_kernels_are_checked_and_nothing_is_timed(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = python(tree_attention.__file__, "--quick", "--output", str(output))

    assert done.returncode == 0, done.stderr
    assert "No GPU: nothing is timed." in done.stdout
    assert "DIFFERS" not in done.stdout
    assert not any(unit in done.stdout for unit in ("µs", "GB/s", "floor"))
    written = json.loads(output.read_text())
    assert written["timings"] is None
    assert not {"targets", "copy_gbps"} & written.keys()
    checks = written["checks"]
    assert all(check["error"] <= check["tolerance"] for check in checks)
    assert {check["kernel"] for check in checks} == {
        *("tree", "tree, 3 parts", "one node", "beams apart", "flex_attention's mask"),
        *("accept_path", "compact_kv", "build_tree"),
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `measure_everything`'s files."""
    folder = tmp_path_factory.mktemp("measured")
    done = python(__file__, str(folder), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return folder


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_comparison_is_measured_or_says_why_not(measured: Path) -> None:
    first, second, third = load(measured / "sweep.json")["timings"]["attention"]

    timed = {"microseconds": [10.0, 30.0, 20.0]}
    for result in (first, second, third):
        for name in ("tree", "launched", "one_node", "beams"):
            assert result[name] == timed, result
    # See Stopwatch.compile.
    assert first["flex"] == {"reason": "failed: RuntimeError: no compiler found"}
    assert second["flex"]["reason"].startswith("wrong: differs from tree attention by 100% of its")
    assert third["flex"] == timed
    assert (third["nodes"], third["leaves"], third["heads"]) == ("3x2", 6, "tiny")


def test_cases_beyond_memory_are_skipped_aloud(measured: Path) -> None:
    skipped = "the KV cache would take 0.04 GB, more than 80% of the 0.01 GB of GPU memory"

    assert skipped in load(measured / "sweep.json")["skipped"][0]
    said = (measured / "sweep.txt").read_text()
    assert said.count(skipped) == 2  # as it happens, and below the tables


def test_floors_are_printed_before_times(measured: Path) -> None:
    lines = (measured / "sweep.txt").read_text().splitlines()
    at = lines.index("tiny, batch 2, context 20, nodes 4: 0.0 MB, floor 0.0 µs")

    assert lines[at + 1] == "  20.0 µs"
    assert "Copy bandwidth: 1000 GB/s" in lines[:at]


def test_what_surrounds_attention_is_measured(measured: Path) -> None:
    steps = load(measured / "sweep.json")["timings"]["steps"]
    walks = [step for step in steps if step["kernel"] == STEP]
    builds = [step for step in steps if step["kernel"] == "build_tree"]

    assert [step["nodes"] for step in walks] == ["4", "8", "3x2"]
    assert all(step["floor_bytes"] > 0 and step["layers"] == 2 for step in walks)
    assert [step["nodes"] for step in builds] == ["4", "8", "3x2"]
    assert all("microseconds" in step[form] for step in steps for form in ("graph", "launched"))


def test_verdicts_are_printed_and_written(measured: Path) -> None:
    targets = load(measured / "sweep.json")["targets"]
    printed = (measured / "sweep.txt").read_text()

    assert [target["status"] for target in targets] == ["not measured"] * 4
    assert printed.count("not measured") == 4
    assert "This is another GPU (none)." in printed


def test_tune_tries_numbers_of_parts(measured: Path) -> None:
    (found,) = load(measured / "tune.json")["timings"]["num_parts"]

    assert list(found["times"]) == ["auto", "1", "3"]
    assert "num_parts, µs" in (measured / "tune.txt").read_text()


def test_a_wrong_kernel_is_not_timed(measured: Path) -> None:
    assert load(measured / "wrong.json")["timings"] is None
    assert "nothing is timed" in (measured / "wrong.txt").read_text()


def test_success_means_that_our_kernels_are_right_and_ran(measured: Path) -> None:
    """flex_attention may fail."""
    passed = load(measured / "passed.json")
    assert passed == {"sweep": True, "tune": True, "wrong": False, "failing": False}
    (target, *_) = load(measured / "failing.json")["timings"]["attention"]
    assert target["tree"] == {"reason": "failed: ValueError: out of luck"}


def test_options_reach_the_measurement(measured: Path) -> None:
    written = load(measured / "options.json")

    assert written["options"]["contexts"] == [30]
    assert (written["driver"], written["machine"]["gpu"]) == ("none", "not a GPU")
    assert "triton" in written["versions"]
    (result,) = written["timings"]["attention"]
    assert {name: result[name] for name in ("heads", "batch", "context", "nodes")} == {
        "heads": "tiny",
        "batch": 1,
        "context": 30,
        "nodes": "2",
    }
    assert result["flex"] == {"reason": "not run: --no-flex"}


def measure_everything(folder: Path) -> None:
    """Measurements with a stopwatch that runs each launch once and invents its time."""
    import tree_attention_gpu
    import tree_attention_run
    from tree_attention_measure import Settings
    from tree_attention_run import Report, run

    class Stopwatch:
        name = "not a GPU"
        device = CPU
        free_bytes = 10_000_000  # walks of 32 layers fit, the last case does not

        def __init__(self, failing: bool = False) -> None:
            self.compiled = 0
            self.failing = failing

        def in_graph(self, launch: Callable[[], object]) -> Timing:
            if self.failing:
                raise ValueError("out of luck")
            launch()
            return Timing([10.0, 30.0, 20.0])

        launched = in_graph

        def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
            self.compiled += 1
            if self.compiled == 1:
                raise RuntimeError("no compiler found\nand more")
            if self.compiled == 2:
                return lambda query, *args, **kwargs: torch.zeros_like(query)
            return function

        def copy_bandwidth(self) -> float:
            return 1000.0

        def describe(self) -> dict[str, str]:
            return {"driver": "none"}

    cases = [tiny("4"), tiny("8", batch=1), tiny("3x2"), tiny("4", context=40_000)]
    settings = Settings(layers=2)
    right = [Check("tree", "a case", 0.0, 0.0)]
    wrong = [Check("tree", "a case", float("inf"), 0.0)]
    passed = {}
    for name, some, options, checks in (
        ("sweep", cases, settings, right),
        ("tune", cases[:1], replace(settings, tune=True), right),
        ("wrong", cases[:1], settings, wrong),
        ("failing", cases[:1], settings, right),
    ):
        report = Report({"machine": {"gpu": "none"}}, folder / f"{name}.json")
        with (
            (folder / f"{name}.txt").open("w") as file,
            patch.multiple(
                tree_attention_run, PARTS_TO_TRY=(1, 3), check_kernels=Mock(return_value=checks)
            ),
        ):
            console = Console(file=file, width=200)
            stopwatch = Stopwatch(failing=name == "failing")
            passed[name] = run(stopwatch, some, options, report, console)
    (folder / "passed.json").write_text(json.dumps(passed))

    args = tree_attention.parser().parse_args(
        [
            *("--batches", "1", "--contexts", "30", "--nodes", "2", "--repeats", "1"),
            *("--shapes", "llama-7b", "--no-flex", "--output", str(folder / "options.json")),
        ]
    )
    with (
        patch.dict(HEADS, {"llama-7b": TINY}),
        patch.object(tree_attention_gpu, "Gpu", lambda repeats: Stopwatch()),
        patch.object(tree_attention_run, "check_kernels", lambda *arguments: right),
    ):
        tree_attention.on_gpu(args)


if __name__ == "__main__":
    measure_everything(Path(sys.argv[1]))
