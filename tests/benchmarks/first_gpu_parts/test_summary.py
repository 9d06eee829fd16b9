"""The summary has every step, how its tests ended, and the end of its log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from first_gpu_parts import summary


def write_state(out: Path, name: str, status: str, code: int) -> None:
    (out / f"{name}.state").write_text(
        f"status: {status}\nexit: {code}\nseconds: 12\nlimit: 60\ncommit: 0123456789ab\n"
        "command: python a.py --output b\n"
    )


def summarised(out: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["summary", str(out), *names])
    summary.main()
    return (out / "summary.md").read_text()


def test_tests_are_counted_and_those_that_failed_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(tmp_path, "kernel_tests", "failed", 1)
    lines = 2 * summary.LOG_LINES
    (tmp_path / "kernel_tests.log").write_text("\n".join(f"line {i}" for i in range(lines)))
    (tmp_path / "kernel_tests.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="m">t</failure></testcase>'
        '<testcase classname="a" name="left"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    text = summarised(tmp_path, ["kernel_tests", "parity"], monkeypatch)
    assert "| kernel_tests | failed (exit 1) | 12 | 60 | 0123456789ab |" in text
    assert "- 1 passed, 1 failed, 1 skipped\n- failed: `a::bad`" in text
    assert f"line {lines - 1}\n" in text and f"line {summary.LOG_LINES - 1}\n" not in text
    assert "| parity | not run |" in text and "## parity" not in text


def test_results_that_were_cut_off_do_not_hide_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_waiting", "environment"):
        write_state(tmp_path, name, "timed out", 124)
    (tmp_path / "no_waiting.xml").write_text("<testsuites>")
    (tmp_path / "environment.log").write_text("compute capability 9.0\n")
    text = summarised(tmp_path, ["environment", "no_waiting"], monkeypatch)
    assert "compute capability 9.0" in text
    assert "## no_waiting (timed out)\n\n- its results cannot be read" in text


def test_a_log_without_a_state_is_one_of_a_step_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parity.log").write_text("so far\n")
    text = summarised(tmp_path, ["parity"], monkeypatch)
    assert "| parity | interrupted |" in text and "so far" in text
